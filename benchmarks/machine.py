"""What a result must say about where it was measured."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("sglang", "sglang-adaptive", "torch", "triton", "flashinfer-python", "sglang-kernel", "transformers")


def describe() -> dict[str, Any]:
    """GPUs with driver, CPU, cores, and versions of the packages that matter; nothing heavy is imported."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "gpus": _gpus(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
    }


def _gpus() -> list[str]:
    query = "--query-gpu=name,memory.total,driver_version"
    return (_output("nvidia-smi", query, "--format=csv,noheader") or "").splitlines()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
