"""``python -m sglang_adaptive.launch <command> ...``."""

from __future__ import annotations

import sys

from sglang_adaptive.launch import serve

USAGE = f"usage: python -m sglang_adaptive.launch serve ...\n\nserve  {serve.__doc__.split(': ', 1)[1]}"


def main() -> None:
    """Run the command that the first argument names."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] == "serve":
        serve.main(arguments[1:])
    elif arguments in (["-h"], ["--help"]):
        print(USAGE)
    else:
        sys.exit(USAGE)


if __name__ == "__main__":
    main()
