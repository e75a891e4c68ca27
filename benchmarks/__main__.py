"""``python -m sglang_adaptive.benchmarks <command> ...``; each command has a --help."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "prompts": "pack prompts from package data into one file",
    "load": "send one closed-loop load to a running server",
    "absorb": "tokens per second that the load generator itself can take",
    "session": "the steps of a session on a rented machine, resumable",
    "equality": "greedy tokens of one set-up against another's",
    "soak": "mixed load for a long time, in which nothing may be lost",
    "sweep": "compare server set-ups over concurrency, resumable",
    "report": "tables, ratios and the Pareto picture of a sweep",
    "steptime": "time of a decode step on running servers, and profiler traces",
    "simulate": "compare policies on cost tables, without the hardware",
    "fleet": "requests per second that a fleet carries within a latency promise (simulated)",
    "calibration": "score the confidences of recorded traces",
    "train_eagle3": "train an EAGLE3 draft of a small target, by the target alone",
    "shapes": "write configurations of realistic targets, for dummy weights",
    "sizing": "time the sizing of a step on this CPU",
    "allocation": "kernels and time of the allocation of a budget on a GPU",
    "observing": "CPU time that metrics and a trace cost a step",
    "stacks": "where a scheduler's CPU time goes, from sampled Python stacks",
    "trace_syncs": "count synchronising calls per step in a profiler trace",
}


def main(argv: list[str]) -> int:
    """Run the command that the first argument names, importing only its module."""
    usage = "usage: python -m sglang_adaptive.benchmarks COMMAND ...\n\n" + "\n".join(
        f"  {name:<12} {text}" for name, text in COMMANDS.items()
    )
    if argv[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if not argv or argv[0] not in COMMANDS:
        print(usage, file=sys.stderr)
        return 2
    # By name from this package: it is mapped to a folder at the top of the repository.
    module = importlib.import_module(f"sglang_adaptive.benchmarks.{argv[0]}")
    return module.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
