"""The quickstart ends with an error and a reason when a server does not come up; stand-ins take the server's place."""

import subprocess
import sys

import pytest

from sglang_adaptive.launch.quickstart import stage


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


def test_a_start_is_told_in_words_and_not_by_lines_of_the_log():
    """The marks are the host's own lines; the draft's weights come after the target's memory is there."""
    said = {
        "UserWarning: Only CUDA supports AWQ": "importing SGLang",
        "[12:00:01] server_args={'model_path': 't'}": "reading the model's files",
        "[12:00:02] Load weight begin. avail mem=17 GB": "loading weights",
        "[12:00:03] Memory pool end. avail mem=16 GB": "preparing the first step",
        "[12:00:04] Load weight begin. avail mem=16 GB": "loading weights",
        "[12:00:05] Capture decode CUDA graph begin. bs=[1]": "capturing CUDA graphs",
        "[12:00:06] sglang_adaptive: profiling step costs, 1/20": "measuring what steps cost on this machine",
        "[12:00:07] INFO:     Uvicorn running on http://127.0.0.1:1": "answering a first request of its own",
    }
    log = ""
    for line, what in said.items():
        log += f"{line}\n[12:00:09] Applied 1 hook(s) to something\n"
        assert stage(log) == what
