"""Drafts and cost tables that are damaged: one sentence, or one warning, and never a traceback."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from sglang_adaptive import checks
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.options import Options

CFG = SimpleNamespace(
    trust_remote_code=False,
    speculative_draft_model_revision=None,
    json_model_override_args="{}",
    load_format="auto",
)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x00\x00\x00\x00\x00\x00\x00\x7f{}", b"<html>not found</html>"]
)
def test_weights_that_are_no_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(AdaptiveError, match=r"cannot be read .*: download it again"):
        checks._check_confidence_head(str(tmp_path), SimpleNamespace())


def test_a_folder_without_weights_and_a_path_that_is_not_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AdaptiveError, match="has no weights"):
        checks._draft_config(str(tmp_path), CFG)
    with pytest.raises(AdaptiveError, match="does not exist"):
        checks._draft_config(str(tmp_path / "nowhere"), CFG)


@pytest.mark.parametrize("value", [0, -1, 1000, 129, 7.5, "seven", True, [7], float("nan")])
@pytest.mark.parametrize("where", ["block_size", "dspark_block_size", "dflash_config"])
def test_a_block_size_that_cannot_be(where, value):
    draft = SimpleNamespace(**{where: {"block_size": value} if where == "dflash_config" else value})
    with pytest.raises(AdaptiveError, match=r"The draft model d has the block size .* whole number from 1 to 128"):
        checks._check_block("d", draft, CFG)


def test_block_sizes_that_can_be_and_which_field_counts():
    for value in (1, 7, 16, 128, None):
        checks._check_block("d", SimpleNamespace(block_size=value), CFG)
    checks._check_block("d", SimpleNamespace(dspark_config=[1], dflash_config="text"), CFG)
    # As in the host: the prefixed field, then the section, then the plain one.
    checks._check_block("d", SimpleNamespace(dspark_block_size=5, block_size=0), CFG)
    checks._check_block("d", SimpleNamespace(dflash_config={"block_size": 5}, block_size=0), CFG)


@pytest.mark.parametrize("value", [0, -3, 1000])
def test_a_block_size_flag_that_cannot_be(value):
    flag = SimpleNamespace(speculative_dspark_block_size=value)
    with pytest.raises(AdaptiveError, match="--speculative-dspark-block-size is"):
        checks._check_block("d", SimpleNamespace(block_size=7), flag)


def test_a_damaged_draft_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    from sglang.srt.arg_groups import overrides

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "markov_rank": 8, "block_size": 1000}))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    cfg = SimpleNamespace(
        **vars(CFG),
        **{field: None for field, _, _ in checks._UNSUPPORTED},
        pp_size=1,
        attn_dp_size=1,
        disaggregation_mode="null",
        speculative_draft_model_path=str(tmp_path),
    )
    monkeypatch.setattr(overrides, "resolving_view", lambda server_args: server_args)
    with pytest.raises(AdaptiveError, match="has the block size 1000"):
        checks.before(cfg, checks.DSPARK)


def test_fields_in_a_section_that_is_no_table():
    assert checks._nested(SimpleNamespace(dspark_config=[1], dflash_config={"x": 3}), "x") == 3
    assert checks._nested(SimpleNamespace(dspark_config="text"), "x", 7) == 7


@pytest.mark.parametrize("name", ["CACHE_DIR", "TRACE"])
@pytest.mark.parametrize("value", ["~nosuchuser/x", "/" + "x" * 5000])
def test_paths_that_cannot_be(name, value):
    with pytest.raises(AdaptiveError, match=name.lower()):
        Options.from_env({f"SGLANG_ADAPTIVE_{name}": value})


def test_whatever_lies_where_the_cost_table_should_be_is_one_warning(tmp_path, caplog):
    profiler = pytest.importorskip("sglang_adaptive.runtime.profiler")
    folder, fifo, text = tmp_path / "folder", tmp_path / "fifo", tmp_path / "text"
    folder.mkdir()
    os.mkfifo(fifo)
    text.write_text("{")
    for path in (folder, fifo, text):
        caplog.clear()
        with caplog.at_level("WARNING"):
            assert profiler._load(path, {}) is None
        assert len(caplog.records) == 1 and "profiling again" in caplog.text
    assert profiler._load(tmp_path / ("x" * 300), {}) is None
    assert profiler._load(tmp_path / "missing", {}) is None
