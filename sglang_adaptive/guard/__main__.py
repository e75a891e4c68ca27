"""``python -m sglang_adaptive.guard record``: record fingerprints and sites of the installed, pinned host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_adaptive.guard import fingerprints, host, sites
from sglang_adaptive.guard.symbols import symbols


def main() -> None:
    """``record`` writes both files, ``check`` prints the drift and fails when there is any."""
    command = sys.argv[1:]
    if command == ["record"]:
        host.require_version()
        _write(fingerprints.RECORD, fingerprints.record(symbols()))
        _write(sites.RECORD, sites.walk())
    elif command == ["check"]:
        fingerprints.require()
    else:
        sys.exit("usage: python -m sglang_adaptive.guard record|check")


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{path.name} written")


if __name__ == "__main__":
    main()
