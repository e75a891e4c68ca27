"""What must not start: one sentence that says what to do, a non-zero exit, before any weight is loaded."""

from __future__ import annotations

import pytest
from server import failed_start, speculative
from tiny_pair import faulty_draft

pytestmark = pytest.mark.e2e


def refused(target, *arguments, log_dir, environment=None, fresh=False) -> str:
    """Start a server that must refuse; returns its one line."""
    status, output = failed_start(target, *arguments, log_dir=log_dir, environment=environment, fresh=fresh)
    lines = [line for line in output.splitlines() if line.startswith("sglang_adaptive: ")]
    assert status not in (0, None), output[-3000:]
    assert len(lines) == 1, output[-3000:]
    assert "Load weight begin" not in output
    assert "Traceback" not in output, output[-3000:]
    return lines[0]


def test_no_draft(tiny_pair, log_dir):
    line = refused(tiny_pair[0], "--speculative-algorithm", "DSPARK_ADAPTIVE", log_dir=log_dir, fresh=True)
    assert "needs a draft model" in line and "--speculative-draft-model-path" in line


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no_confidence_head", "no confidence head"),
        ("other_vocabulary", "vocabulary size is 320, the target's 256"),
        ("other_hidden_size", "trained for another target: its hidden size"),
    ],
)
def test_a_draft_that_does_not_fit(tiny_pair, tmp_path, log_dir, fault, said):
    target, draft = tiny_pair
    line = refused(target, *speculative(faulty_draft(draft, fault, tmp_path / fault)), log_dir=log_dir)
    assert said in line


def test_a_folder_that_is_no_checkpoint(tiny_pair, tmp_path, log_dir):
    assert "has no config.json" in refused(tiny_pair[0], *speculative(tmp_path), log_dir=log_dir)


def test_a_draft_of_no_known_family(tiny_pair, log_dir):
    line = refused(tiny_pair[0], *speculative(tiny_pair[0]), log_dir=log_dir)
    assert "no Markov head" in line and "nor an EAGLE, EAGLE3 or MTP draft" in line


def test_an_unknown_value_of_an_option(tiny_pair, log_dir):
    line = refused(
        *tiny_pair[:1], *speculative(tiny_pair[1]), log_dir=log_dir, environment={"SGLANG_ADAPTIVE_MIN_GAIN": "much"}
    )
    assert "min_gain" in line and "'much'" in line and "a number from 0 to 1" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--enable-two-batch-overlap",), "two-batch overlap"),
        (("--pipeline-parallel-size", "2"), "pipeline parallelism"),
        (("--speculative-adaptive",), "adaptive steps"),
        (("--attention-backend", "torch_native"), "cannot verify draft tokens"),
    ],
)
def test_flags_that_do_not_go_together(tiny_pair, log_dir, flags, said):
    target, draft = tiny_pair
    assert said in refused(target, *speculative(draft), *flags, log_dir=log_dir)


def test_a_ragged_mode_of_the_users_own(tiny_pair, log_dir):
    target, draft = tiny_pair
    environment = {"SGLANG_RAGGED_VERIFY_MODE": "static"}
    assert "unset it" in refused(target, *speculative(draft), log_dir=log_dir, environment=environment)


def test_another_release_of_the_host(tiny_pair, tmp_path, log_dir):
    """A distribution that says it is another release stands before the real one on the path."""
    info = tmp_path / "sglang-0.5.22.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    target, draft = tiny_pair
    environment = {"PYTHONPATH": str(tmp_path)}
    line = refused(target, *speculative(draft), log_dir=log_dir, environment=environment, fresh=True)
    assert "0.5.23" in line and "0.5.22" in line
