"""Samples the Python stack of a server's processes; see ``python -m sglang_adaptive.benchmarks stacks --help``.

A timer's signal interrupts the main thread between two bytecodes, so a long call into C counts for the line that made
it. Nothing happens but in processes that multiprocessing spawned (the scheduler is one) with STACKS_OUT in their
environment. Until the file $STACKS_OUT.on exists, a signal a second looks for it; its text becomes part of the names.
"""

import collections
import os
import signal
import sys

OUT = os.environ.get("STACKS_OUT")
AFTER, INTERVAL, LOOK, DEPTH = 5.0, 0.002, 0.5, 48


class Sampler:
    def __init__(self):
        self.counts = collections.Counter()
        self.tag = None
        self.busy = False
        signal.signal(signal.SIGALRM, self.tick)
        signal.setitimer(signal.ITIMER_REAL, AFTER, LOOK)

    def tick(self, _number, frame):
        if self.busy:  # where a tick takes longer than the interval, it would sample itself
            return
        self.busy = True
        try:
            self.sample(frame)
        finally:
            self.busy = False

    def sample(self, frame):
        try:
            with open(f"{OUT}.on") as file:
                tag = file.read().strip() or "stacks"
        except OSError:
            tag = None
        if tag != self.tag:
            self.write()
            self.tag = tag
            pause = LOOK if tag is None else INTERVAL
            signal.setitimer(signal.ITIMER_REAL, pause, pause)
        if tag is not None:
            stack = []
            while frame is not None and len(stack) < DEPTH:
                code = frame.f_code
                stack.append(f"{os.path.basename(code.co_filename)}:{code.co_name}:{frame.f_lineno}")
                frame = frame.f_back
            self.counts[";".join(reversed(stack))] += 1

    def write(self):
        if self.counts:
            with open(f"{OUT}-{self.tag}-{os.getpid()}.txt", "w") as file:
                file.writelines(f"{count} {stack}\n" for stack, count in self.counts.most_common())
        self.counts.clear()


if OUT and any("spawn_main" in argument for argument in sys.orig_argv):
    Sampler()
