"""``python -m sglang_adaptive``: the commands that are for people, not for servers."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "doctor": ("sglang_adaptive.guard.doctor", "would it run here, and what would it do?"),
    "top": ("sglang_adaptive.observe.top", "what a running server decides, live in the terminal"),
    "report": ("sglang_adaptive.observe.report", "a trace as a page of charts"),
}
USAGE = "\n".join(
    [
        "usage: python -m sglang_adaptive COMMAND [--help]",
        "",
        "commands:",
        *(f"  {name:<8} {does}" for name, (_, does) in COMMANDS.items()),
    ]
)


def main() -> None:
    """Run the command that the first argument names."""
    arguments = sys.argv[1:]
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
    elif arguments and arguments[0] in COMMANDS:
        module, _ = COMMANDS[arguments[0]]
        sys.exit(importlib.import_module(module).main(arguments[1:]))
    else:
        sys.exit(USAGE)


if __name__ == "__main__":
    main()
