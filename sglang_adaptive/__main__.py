"""``python -m sglang_adaptive doctor``."""

from __future__ import annotations

import sys

USAGE = "usage: python -m sglang_adaptive doctor [--json]"


def main() -> None:
    """Run the command that the first argument names."""
    arguments = sys.argv[1:]
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
    elif arguments[:1] == ["doctor"]:
        from sglang_adaptive.guard import doctor

        sys.exit(doctor.main(arguments[1:]))
    else:
        sys.exit(USAGE)


if __name__ == "__main__":
    main()
