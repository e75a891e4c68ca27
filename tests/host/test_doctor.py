"""The doctor on this machine, for real."""

from __future__ import annotations

import json
import subprocess
import sys

import torch


def test_the_doctor_finds_this_machine_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_ADAPTIVE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    command = [sys.executable, "-m", "sglang_adaptive", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(result.stdout)
    assert result.returncode == 0 and report["ok"], report["verdict"]
    found = {}
    for item in report["findings"]:
        found.setdefault(item["name"], []).append(item["text"])
    assert "DSPARK_ADAPTIVE is registered" in found["algorithm"][0]
    assert ("AdaptiveCpuPlatform" in found["platform"][0]) == (not torch.accelerator.is_available())
    if not torch.accelerator.is_available():
        assert "adaptive_cpu" in report["verdict"]
