"""The quickstart ends with an error and a reason when a server does not come up; stand-ins take the server's place."""

import subprocess
import sys

import pytest


def quickstart(tmp_path, body: str, *options: str) -> subprocess.CompletedProcess:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{body}\n")
    stand_in.chmod(0o755)
    command = [sys.executable, "-m", "sglang_adaptive.launch.quickstart", "--python", str(stand_in)]
    command += ["--cache-dir", str(tmp_path), "--target", "t", "--draft", "d", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_server_that_dies_fails_the_quickstart(tmp_path):
    result = quickstart(tmp_path, "raise SystemError('no such model')")
    assert result.returncode == 1
    assert "error: the server ended with exit status 1: SystemError: no such model" in result.stderr
    assert "passed" not in result.stdout + result.stderr


def test_a_server_that_hangs_fails_the_quickstart(tmp_path):
    result = quickstart(tmp_path, "import time; time.sleep(600)", "--start-seconds", "1")
    assert result.returncode == 1
    assert "error: the server was not ready after 1 s" in result.stderr


@pytest.mark.parametrize("options", [["--target", "t"], ["--draft", "d"]])
def test_target_and_draft_belong_together(options):
    command = [sys.executable, "-m", "sglang_adaptive.launch.quickstart", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 2 and "belong together" in result.stderr
