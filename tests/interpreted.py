"""Scripts of kernels under Triton's interpreter, which must be asked for before the host is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def found_by(script: Path) -> dict[str, Any]:
    """The JSON object in the last line that ``script`` prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SGLANG_PLUGINS": "none"}
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
