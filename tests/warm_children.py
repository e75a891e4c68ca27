"""Children of a warm interpreter's fork that need not import the host either.

The host starts its scheduler and its detokenizer through ``multiprocessing``'s spawn: a new interpreter that imports
everything once more. Here the parent forks a few children before it has become anything, and a spawn wakes one of them
instead: a true child with what the host's spawn passes on (arguments, environment, folder, open files) and nothing
else of its parent. What they share beyond that is the seed of string hashes, so processes that must agree with each
other, the ranks of one model, start as they always do.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import multiprocessing.util
import os
import socket
import sys
from typing import Any

import torch

_SPARES = 2  # a scheduler and a detokenizer
_SEVERAL_RANKS = ("--tp", "--tp-size", "--tensor-parallel-size", "--dp", "--dp-size", "--data-parallel-size")
_PARK = 512  # descriptors from here on are nobody's


def keep_spares(argv: list[str]) -> dict[str, Any] | None:
    """Fork children that wait to be spawned; in a child, return what its parent wanted of it.

    ``argv`` is what the parent is going to be. To be called by a process with one thread.
    """
    if any(argument.split("=")[0] in _SEVERAL_RANKS for argument in argv):
        return None
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(_SPARES):
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for _, other in [*spares, (0, mine)]:
                other.close()
            return _wait(theirs)
        theirs.close()
        spares.append((pid, mine))
    original = multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, arguments: list[str | bytes], descriptors: list[int]) -> int:
        if not spares or "--multiprocessing-fork" not in arguments:
            return original(path, arguments, descriptors)
        pid, channel = spares.pop(0)
        descriptors = sorted(set(map(int, descriptors)))
        arguments = list(map(os.fsdecode, arguments))
        wanted = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "as": descriptors}
        with channel:
            message = json.dumps(wanted).encode()
            socket.send_fds(channel, [len(message).to_bytes(8, "big")], descriptors)
            channel.sendall(message)
        return pid

    multiprocessing.util.spawnv_passfds = spawn
    return None


def _wait(channel: socket.socket) -> dict[str, Any]:
    head, descriptors, _, _ = socket.recv_fds(channel, 8, 64)
    if not head:
        os._exit(0)  # the parent is gone, and never needed this one
    message = b""
    while len(message) < int.from_bytes(head, "big"):
        message += channel.recv(1 << 20)
    channel.close()
    wanted = json.loads(message)
    # A pickled connection names its descriptor by number, so each has to get that of its parent.
    parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _PARK) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(parked, wanted["as"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return wanted


def become_spawned(wanted: dict[str, Any]) -> None:
    """Run what the parent would have started an interpreter for. Raises SystemExit with its exit status."""
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    arguments = wanted["arguments"]
    place = arguments.index("-c")
    sys.orig_argv[:] = arguments
    sys.argv[:] = ["-c", *arguments[place + 2 :]]
    begin_like_an_interpreter()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP was loaded under the parent's
    exec(compile(arguments[place + 1], "<string>", "exec"), {"__name__": "__main__"})


def begin_like_an_interpreter() -> None:
    """What the interpreter does with ``PYTHONPATH`` before it runs anything."""
    folders = os.environ.get("PYTHONPATH")
    if not folders:
        return
    sys.path[1:1] = folders.split(os.pathsep)
    sys.modules.pop("sitecustomize", None)
    importlib.invalidate_caches()
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
