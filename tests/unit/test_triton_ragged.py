"""Packed verification under attention backend triton: its own kernel, interpreted, against attention by hand; and where
it verifies every draft token, with the reason."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interpreted import found_by
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config

from sglang_adaptive import activation
from sglang_adaptive.guard import backends
from sglang_adaptive.options import variable
from sglang_adaptive.runtime import widths

SCRIPT = Path(__file__).parents[1] / "triton_packed.py"


@pytest.fixture(scope="module")
def found() -> dict:
    """What the script found under Triton's interpreter, which must be asked for before the host is imported."""
    return found_by(SCRIPT)


def test_packed_rows_attend_to_what_they_should(found):
    cases = {name: case for name, case in found.items() if name.startswith(("eager", "graph"))}
    wrong = [name for name, case in cases.items() if case["error"] > 1e-5 or not case["padding_is_finite"]]
    assert len(cases) > 20 and wrong == []


def test_a_graph_reads_the_lengths_of_each_replay_where_it_was_captured(found):
    replays = {name: case for name, case in found.items() if "begins" in case}
    assert replays and all(case["same_memory"] for case in replays.values())
    assert replays["graph of 8, mixed"]["begins"] == [0, 1, 5, 7, 8]
    # Slots without a request share the padding; where there is none, it follows the last request's rows.
    assert replays["graph of 16, one request"]["begins"] == [0, 2, 7, 12, 16]
    assert replays["graph of 16, as many requests as slots"]["begins"] == [0, 2, 3, 6, 16]


def test_it_is_patched_under_the_option_only_and_not_where_rows_are_equal(found):
    assert found["patched"] == [False, False, True]
    refusals = found["refusals"]
    assert refusals["none"] == "supports graphs: True" and refusals["draft"] == "supports graphs: False"
    assert "sliding windows: unset SGLANG_ADAPTIVE_TRITON_RAGGED" in refusals["window"]


def config(**others):
    fields = {"device": "cuda", "enable_lora": None, "lora_paths": None, "enable_deterministic_inference": False}
    return SimpleNamespace(**{**fields, "dcp_size": 1, "cuda_graph_config": default_cuda_graph_config(), **others})


def model(text=None, **others):
    fields = {"sliding_window_size": None, "is_hybrid_swa": False, "attention_chunk_size": None}
    fields |= {"hf_text_config": SimpleNamespace(**(text or {})), "attention_arch": AttentionArch.MHA}
    return SimpleNamespace(**{**fields, **others})


@pytest.mark.parametrize(
    ("cfg", "target", "reason"),
    [
        (config(), model(), None),
        (config(), model({"use_sliding_window": False}, sliding_window_size=4096), None),
        (config(), model(sliding_window_size=4096), "sliding windows"),
        (config(), model(is_hybrid_swa=True), "sliding windows"),
        (config(), model(attention_chunk_size=8192), "sliding windows"),
        (config(enable_deterministic_inference=True), model(), "--enable-deterministic-inference"),
        (config(dcp_size=2), model(), "context-parallel"),
    ],
)
def test_which_targets_it_takes(cfg, target, reason):
    said = backends.unable_triton(cfg, target)
    assert (said is None) if reason is None else (reason in said)


@pytest.mark.parametrize(
    ("option", "cfg", "target", "mode"),
    [
        ("off", config(), model(), "static"),
        ("on", config(), model(), "compact"),
        ("on", config(enable_deterministic_inference=True), model(), "static"),
        ("on", config(), model(attention_arch=AttentionArch.MLA), "static"),
        ("on", config(enable_lora=True), model(), "static"),
    ],
)
def test_what_is_decided_before_weights_load(option, cfg, target, mode, monkeypatch, caplog):
    monkeypatch.setenv(activation.RAGGED_MODE, "compact")
    monkeypatch.setenv(variable("triton_ragged"), option)
    monkeypatch.setattr(activation, "_mode_is_ours", False)
    monkeypatch.setattr(overrides, "resolving_view", lambda _: cfg)
    monkeypatch.setattr(overrides, "model_config_of", lambda _: target)
    monkeypatch.setattr(overrides, "attention_backends_of", lambda _: ["triton"])
    monkeypatch.setattr(backends, "unable_target", lambda _: None)
    args = SimpleNamespace(_sglang_adaptive=activation.Marker("compact", "DSPARK"))
    activation._fall_back_to_uniform(args)
    assert (args._sglang_adaptive.mode, os.environ[activation.RAGGED_MODE]) == (mode, mode)
    assert len([record for record in caplog.records if "verifies every draft token" in record.message]) == (
        mode == "static"
    )


def test_the_capability_follows_the_option():
    assert [backends.capability("triton", False, on) for on in (False, True)] == [backends.UNIFORM, backends.GRAPHS]
    assert backends.capability("triton", True, True) == backends.UNIFORM


def test_memory_for_more_widths_counts_tables_of_every_row():
    """Triton's graphs keep a list of the whole context for each of their rows, not only for each request."""
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((1, 1000), dtype=torch.int8)),
        page_size=1,
        attn_backend=SimpleNamespace(),
    )
    graphs = SimpleNamespace(max_bs=10)
    before = widths._table_bytes(runner, graphs)
    runner.attn_backend.cuda_graph_kv_indices = torch.zeros(10 * 8 * 1000, dtype=torch.int64)
    assert widths._table_bytes(runner, graphs) - before >= 10 * 8 * 1000 * 8
