"""The quickstart itself, on the tiny pair: it serves both ways, compares, and leaves no server behind."""

import re
import subprocess
import sys

import psutil
import pytest
from tiny_language import EASY, random_prompts

pytestmark = pytest.mark.e2e
LOG = "quickstart-with-DSPARK_ADAPTIVE.log"


def test_quickstart(tiny_pair, tmp_path):
    target, draft = tiny_pair
    command = [sys.executable, "-m", "sglang_adaptive.launch.quickstart", "--cache-dir", str(tmp_path)]
    questions = tmp_path / "questions"
    questions.write_text("\n".join(random_prompts(8, seed=5, kinds=(EASY,))))
    command += ["--target", str(target), "--draft", str(draft), "--max-tokens", "48", "--questions", str(questions)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "DSPARK_ADAPTIVE is active on every tensor-parallel rank: rank 0" in result.stderr
    equal = r"equal those without speculation, letter for letter: 16 of 16 \(8 questions, 2 rounds\)$"
    assert re.search(equal, result.stdout, re.MULTILINE), result.stdout
    row = r"^tokens out per request and step +1\.00 +(\d+\.\d+) "
    assert float(re.search(row, result.stdout, re.MULTILINE)[1]) > 1
    assert all(question in result.stdout for question in questions.read_text().splitlines())
    logs = [tmp_path / "logs" / name for name in (LOG, "quickstart-without-speculation.log")]
    assert all(str(log) in result.stdout and str(log) in result.stderr and log.stat().st_size for log in logs)
    assert "server_args" not in result.stderr and "INFO:" not in result.stderr, "lines of the server's log"
    assert result.stdout.rstrip().endswith(f"--speculative-draft-model-path {draft}"), "the command to serve it"
    marker = ["--port", *re.findall(r"'port': (\d+)", (tmp_path / "logs" / LOG).read_text())[:1]]
    assert len(marker) == 2 and not [each for each in psutil.process_iter(["cmdline"]) if _has(each, marker)]


def _has(process: psutil.Process, words: list[str]) -> bool:
    line = process.info["cmdline"] or []
    return any(line[i : i + len(words)] == words for i in range(len(line)))
