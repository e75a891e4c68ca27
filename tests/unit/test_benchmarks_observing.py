"""What metrics and a trace cost is timed on the real recorder and the real exporter."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_adaptive.benchmarks import config, observing
from sglang_adaptive.runtime.trace_reader import read_trace


def test_every_step_is_recorded_and_every_part_is_timed(tmp_path, monkeypatch, capsys):
    recorded = []

    class Recorder(observing.TraceRecorder):
        def close(self) -> None:
            first = self.recording
            super().close()
            if first:  # the end of the process closes it again
                recorded.append(len(read_trace(self.path).steps))

    monkeypatch.setattr(observing, "TraceRecorder", Recorder)
    path = tmp_path / "found.json"
    for _ in range(2):
        arguments = ["--requests", "4", "--drafts", "3", "--steps", "128", "--json", str(path)]
        assert observing.main(arguments) == 0
    assert recorded == [128, 128]
    found = json.loads(path.read_text())
    assert found["sums (always)"][0] > 0 and found["trace"][0] > 0 and found["trace"][1] > 0
    assert capsys.readouterr().out.count("| metrics |") == 2


def test_the_sweep_compares_on_and_off_and_equal_servers(monkeypatch):
    for name in ("TARGET", "DRAFT", "PROMPTS"):
        monkeypatch.setenv(name, "x")
    sweep = config.read(Path(observing.__file__).parent / "configs" / "observing.toml")
    off, on, again = sweep.arms
    assert off.args == again.args and off.env == again.env == {}
    assert set(on.args) - set(off.args) == {"--enable-metrics"} and "SGLANG_ADAPTIVE_TRACE" in on.env
    assert sweep.concurrency == [64] and sweep.resident == 3
