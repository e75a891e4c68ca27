"""Starts a server whose acceptance is simulated, for benchmarks of targets with dummy weights.

    ADAPTIVE_BENCH_ACCEPTANCE=FILE.toml python -m sglang_adaptive.benchmarks.acceptance_server SERVER_ARGUMENTS

The arguments are those of ``python -m sglang.launch_server``; ``--load-format dummy`` must be among them. The module is
the main module of the server's processes, too, and patches the host there (patches/simulated_acceptance.py). Without
speculation nothing is patched.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from sglang_adaptive.benchmarks import acceptance
from sglang_adaptive.errors import AdaptiveError

logger = logging.getLogger(__name__)


def _asked() -> acceptance.Acceptance:
    path = os.environ.get(acceptance.VARIABLE)
    if not path:
        raise AdaptiveError(f"{acceptance.VARIABLE} is not set: let it name a file like those in acceptance_files.")
    return acceptance.read(Path(path))


def patch_this_process() -> None:
    """Simulate acceptance in this process. Raises AdaptiveError where the file or the host is not as expected."""
    from sglang_adaptive.guard import require
    from sglang_adaptive.patches import registry, simulated_acceptance

    require()
    simulated_acceptance.begin(_asked())
    registry.apply(simulated_acceptance.PATCHES)


def main(argv: list[str]) -> None:
    """Check the arguments, say what is simulated, and serve."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    asked = _asked()
    load_plugins()
    server_args = prepare_server_args(argv)
    if server_args.load_format != "dummy" or server_args.speculative_draft_load_format not in (None, "dummy"):
        raise AdaptiveError(
            f"{acceptance.VARIABLE} is for targets and drafts with dummy weights: add --load-format dummy, or start "
            "sglang.launch_server for the acceptance that the models have."
        )
    line = "!" * 20
    logger.warning("%s ACCEPTANCE IS SIMULATED: %s (%s) %s", line, asked.name, asked.source, line)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":
    patch_this_process()
if __name__ == "__main__":
    main(sys.argv[1:])
