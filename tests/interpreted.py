"""Scripts of kernels: under Triton's interpreter, which must be asked for before the host is imported, or on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def found_by(script: Path, interpreted: bool = True) -> dict[str, Any]:
    """The JSON object in the last line that ``script`` prints; on a GPU if not ``interpreted``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"SGLANG_PLUGINS": "none", **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
