"""Sampled stacks of a process that a server would spawn."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_adaptive.benchmarks import stacks
from sglang_adaptive.errors import AdaptiveError

WORK = """
import multiprocessing, signal, time

def busy():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        sum(range(100))

def run_batch():
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.5)  # do not wait for the first look
    busy()
    import os, sys
    os.remove(sys.argv[1])
    time.sleep(0.2)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=run_batch)
    process.start()
    process.join()
"""


def test_a_spawned_process_is_sampled_while_the_file_is_there(tmp_path, capsys):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "out.on").write_text("c1\n")
    environment = {**os.environ, "PYTHONPATH": str(stacks.SAMPLER), "STACKS_OUT": str(tmp_path / "out")}
    command = [sys.executable, str(tmp_path / "work.py"), str(tmp_path / "out.on")]
    subprocess.run(command, env=environment, check=True, timeout=60)
    (found,) = tmp_path.glob("out-c1-*.txt")
    assert stacks.main([f"work={found}:10"]) == 0
    rows = {line.split("|")[1].strip(): line.split("|")[2] for line in capsys.readouterr().out.splitlines()}
    # 1.5 s of work in 10 steps; a busy machine loses some samples.
    assert 20 < float(rows["work.py:busy"]) <= float(rows["work.py:run_batch"]) < 200


def test_a_tick_that_comes_during_another_is_not_a_sample(tmp_path, monkeypatch):
    monkeypatch.setenv("STACKS_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    sampler = runpy.run_path(str(next(Path(stacks.SAMPLER).glob("*.py"))))
    (tmp_path / "out.on").write_text("c1\n")

    def slow_open(*arguments):
        ticking.tick(signal.SIGALRM, sys._getframe())
        return open(*arguments)

    ticking = sampler["Sampler"]()
    ticking.sample.__globals__["open"] = slow_open
    ticking.tick(signal.SIGALRM, sys._getframe())
    assert sum(ticking.counts.values()) == 1
    assert not any("slow_open" in stack for stack in ticking.counts)


def test_ms_per_step_count_a_function_once_and_only_below_the_root():
    rows = [(6, ["a.py:main:1", "a.py:run_batch:2", "b.py:f:3", "b.py:f:9"]), (4, ["a.py:main:1", "c.py:idle:5"])]
    assert stacks.inclusive(rows, 2, "run_batch") == {"a.py:run_batch": 6.0, "b.py:f": 6.0}
    assert stacks.inclusive(rows, 2)["a.py:main"] == 10.0
    text = stacks.table({"x": stacks.inclusive(rows, 2), "y": {"b.py:f": 1.0}}, top=2)
    assert text.splitlines()[2:] == ["| a.py:main | 10.000 | 0.000 |", "| a.py:run_batch | 6.000 | 0.000 |"]


def test_other_files_and_missing_steps_are_refused(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("no sample\n")
    with pytest.raises(AdaptiveError, match="not a file of the sampler"):
        stacks.read(path)
    with pytest.raises(SystemExit):
        stacks.main([f"x={path}"])
    with pytest.raises(SystemExit):
        stacks.main([])
