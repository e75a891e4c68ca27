"""Options: defaults, values, refusals, and the flags of launch serve."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.launch import serve
from sglang_adaptive.options import RULES, Options, flag, help_text, variable


def test_every_option_has_a_rule_and_a_default():
    assert [item.name for item in dataclasses.fields(Options)] == list(RULES)
    assert Options.from_env({}) == Options()


def test_defaults_are_values_that_the_rules_accept():
    for name, value in Options().as_dict().items():
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        if value is not None:
            assert Options.from_env({variable(name): text}) == Options(), name


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Options.from_env({}).cache_dir == tmp_path / "sglang_adaptive"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert Options.from_env({}).cache_dir == Path.home() / ".cache" / "sglang_adaptive"


GOOD = [
    ("policy", "off", False),
    ("min_gain", "0", 0.0),
    ("min_gain", "1", 1.0),
    ("calibration", "off", False),
    ("cost_correction", "on", True),
    ("skip_draft", "off", False),
    ("narrow_drafts", "off", False),
    ("min_verify_len", "3", 3),
    ("max_verify_len", "4", 4),
    ("priority_weight", "2.5", 2.5),
    ("triton_ragged", "on", True),
    ("profile", "refresh", "refresh"),
    ("profile_seconds", "1e1", 10.0),
    ("trace", "", None),
    ("log_decisions", "every", "every"),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_good_value(name, text, value):
    read = getattr(Options.from_env({variable(name): text, "SGLANG_OTHER": "x"}), name)
    assert read == value and type(read) is type(value)


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = Options.from_env({variable("cache_dir"): "not/yet", variable("trace"): "steps.bin"})
    assert (options.cache_dir, options.trace) == (tmp_path / "not/yet", tmp_path / "steps.bin")
    assert options.as_dict()["trace"] == str(tmp_path / "steps.bin")


BAD = [
    *[
        (name, text)
        for name in (
            "policy",
            "calibration",
            "draft_features",
            "cost_correction",
            "skip_draft",
            "narrow_drafts",
            "triton_ragged",
        )
        for text in ("yes", "ON", "")
    ],
    *[("min_gain", text) for text in ("-0.01", "1.01", "nan", "inf", "2%", "")],
    *[(name, text) for name in ("min_verify_len", "max_verify_len") for text in ("0", "-1", "1.5", "all", "²", "")],
    *[("priority_weight", text) for text in ("-1", "11", "nan", "high", "")],
    *[("profile", text) for text in ("true", "Off", "")],
    *[("profile_seconds", text) for text in ("0", "601", "10s", "nan", "")],
    *[("cache_dir", text) for text in ("", "/dev/null")],
    *[("trace", text) for text in ("/dev", "/no/such/folder/file")],
    *[("log_decisions", text) for text in ("all", "")],
]


def test_every_option_has_a_bad_value_below():
    assert {name for name, _ in BAD} == set(RULES)


@pytest.mark.parametrize(("name", "text"), BAD)
def test_bad_value_names_option_value_and_what_is_allowed(name, text):
    with pytest.raises(AdaptiveError) as caught:
        Options.from_env({variable(name): text})
    message = str(caught.value)
    for part in (name, variable(name), flag(name), repr(text), RULES[name].allowed):
        assert part in message
    assert "\n" not in message and message.endswith(".")


def test_minimum_above_maximum_is_refused():
    with pytest.raises(AdaptiveError, match=r"min_verify_len .* is 5, .* max_verify_len, which is 3"):
        Options.from_env({variable("min_verify_len"): "5", variable("max_verify_len"): "3"})
    assert Options.from_env({variable("min_verify_len"): "3", variable("max_verify_len"): "3"}).min_verify_len == 3


@pytest.mark.parametrize(
    ("name", "closest"),
    [("MINGAIN", "MIN_GAIN"), ("MIN_GAINS", "MIN_GAIN"), ("PROFILE_SECS", "PROFILE_SECONDS")],
)
def test_unknown_name_suggests_the_closest(name, closest):
    with pytest.raises(AdaptiveError, match=f"SGLANG_ADAPTIVE_{name} is not .* is SGLANG_ADAPTIVE_{closest}\\."):
        Options.from_env({f"SGLANG_ADAPTIVE_{name}": "1"})


def test_serve_turns_flags_into_variables_and_leaves_the_rest_to_the_host():
    environ, host = serve.split(
        ["--model-path", "m", "--adaptive-min-gain", "0.05", "--adaptive-policy=off", "--tp", "2"]
    )
    assert environ == {"SGLANG_ADAPTIVE_MIN_GAIN": "0.05", "SGLANG_ADAPTIVE_POLICY": "off"}
    assert host == ["--model-path", "m", "--tp", "2", "--speculative-algorithm", "DSPARK_ADAPTIVE"]


@pytest.mark.parametrize("given", [["--speculative-algorithm", "DSPARK"], ["--speculative-algorithm=DSPARK"]])
def test_serve_keeps_the_algorithm_that_the_user_gave(given):
    assert serve.split(given) == ({}, given)


def test_serve_has_a_flag_for_every_option():
    arguments = [part for name in RULES for part in (flag(name), "x")]
    assert serve.split(arguments)[0] == {variable(name): "x" for name in RULES}


def test_serve_refuses_a_misspelt_flag_of_ours():
    with pytest.raises(AdaptiveError, match="--adaptive-min-gian is not an option"):
        serve.split(["--adaptive-min-gian=1"])


def _launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_adaptive.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_serve_help_shows_our_options():
    result = _launch("serve", "--help")
    assert result.returncode == 0
    for name in RULES:
        assert flag(name) in result.stdout
        assert help_text(name).split()[0] in result.stdout


def test_serve_stops_on_a_bad_value_with_one_line_and_no_host():
    result = _launch("serve", "--adaptive-min-gain", "2", "--model-path", "nowhere")
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "from 0 to 1" in result.stderr


def test_launch_without_a_known_command_says_how_to_call_it():
    for arguments in ((), ("server",)):
        result = _launch(*arguments)
        assert result.returncode == 1 and result.stderr.startswith("usage: ")
