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
    assert "DSPARK_ADAPTIVE is active on every rank: rank 0" in result.stderr
    assert re.search(r"equal to those without speculation: 16 of 16$", result.stdout, re.MULTILINE), result.stdout
    accepted = re.search(r"^accepted length, tokens +1\.00 +(\d+\.\d+)$", result.stdout, re.MULTILINE)
    assert float(accepted[1]) > 1
    marker = ["--port", *re.findall(r"'port': (\d+)", (tmp_path / "logs" / LOG).read_text())[:1]]
    assert len(marker) == 2 and not [each for each in psutil.process_iter(["cmdline"]) if _has(each, marker)]


def _has(process: psutil.Process, words: list[str]) -> bool:
    line = process.info["cmdline"] or []
    return any(line[i : i + len(words)] == words for i in range(len(line)))
