"""``python -m sglang_adaptive.launch serve``: the host's server with DSPARK_ADAPTIVE and our options as flags."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from sglang_adaptive import ALGORITHM
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.options import RULES, Options, flag, help_text, variable

ALGORITHM_FLAG = "--speculative-algorithm"


def parser() -> argparse.ArgumentParser:
    """Our flags only; what it does not know is the host's."""
    result = argparse.ArgumentParser(
        prog="python -m sglang_adaptive.launch serve",
        usage="%(prog)s --model-path TARGET --speculative-draft-model-path DRAFT [options]",
        description=f"Start the SGLang server with {ALGORITHM_FLAG} {ALGORITHM}. Nothing below needs to be set.",
        epilog="Every other flag goes to the server: python -m sglang.launch_server --help lists them.",
        allow_abbrev=False,
    )
    for name in RULES:
        result.add_argument(flag(name), dest=name, metavar="VALUE", help=help_text(name).replace("%", "%%"))
    return result


def split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Environment variables that our flags stand for, and the arguments for the host's server.

    Raises AdaptiveError for a flag that looks like ours and is not, which the host would not understand either.
    """
    ours, host = parser().parse_known_args(argv)
    for argument in host:
        if argument.startswith("--adaptive-"):
            raise AdaptiveError(f"{argument.split('=')[0]} is not an option of sglang_adaptive: see serve --help.")
    if not any(argument.split("=")[0] == ALGORITHM_FLAG for argument in host):
        host += [ALGORITHM_FLAG, ALGORITHM]
    return {variable(name): text for name, text in vars(ours).items() if text is not None}, host


def main(argv: Sequence[str]) -> None:
    """Serve until the server ends. Raises AdaptiveError for a wrong option before the host is imported."""
    environ, host = split(argv)
    os.environ.update(environ)
    Options.from_env()
    sys.argv = ["sglang.launch_server", *host]
    # As ``python -m sglang.launch_server`` would: the host's child processes re-import the main module by its name.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
