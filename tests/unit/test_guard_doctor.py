"""The doctor's verdict and exit status, with the machine's answers made up."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_adaptive
from sglang_adaptive import HOST_VERSION
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.guard import backends, doctor, fingerprints, host
from sglang_adaptive.guard.doctor import Finding

# ``healthy`` replaces it.
ATTENTION = doctor._attention


def install(monkeypatch, release: str) -> None:
    """Pretend that this release of the host is installed. Other packages keep their version: one that is imported for
    the first time meanwhile looks at its dependencies, and would stay without torch for the rest of the process."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release if name == "sglang" else real(name))


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """A machine on which everything is in order; the steps that import the host are made up."""
    monkeypatch.setenv("SGLANG_ADAPTIVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    install(monkeypatch, HOST_VERSION)
    monkeypatch.setattr(fingerprints, "check", lambda: [])
    monkeypatch.setattr(doctor, "_seams", lambda: iter([Finding("algorithm", "registered", True)]))
    monkeypatch.setattr(doctor, "_others", lambda: iter([]))
    monkeypatch.setattr(doctor, "_platform", lambda: iter([Finding("platform", "made up", True)]))
    monkeypatch.setattr(doctor, "_attention", lambda: iter([Finding("attention", "with fa3: verifies")]))
    return monkeypatch


def report(capsys) -> dict:
    code = doctor.main(["--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["ok"] else 1)
    return result


def failed(result: dict) -> dict[str, str]:
    return {item["name"]: item["text"] for item in result["findings"] if item["ok"] is False}


def test_a_healthy_machine(healthy, capsys):
    result = report(capsys)
    assert result["ok"] and failed(result) == {}
    assert result["verdict"] == "DSPARK_ADAPTIVE would run here; with fa3: verifies."
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert result["verdict"] in text and "FAIL" not in text


def test_another_release(healthy, capsys):
    install(healthy, "0.5.22")
    result = report(capsys)
    assert list(failed(result)) == ["sglang"] and "0.5.22 is installed" in failed(result)["sglang"]
    assert result["verdict"] == "DSPARK_ADAPTIVE would not run here: see sglang."
    assert doctor.main([]) == 1 and "FAIL  sglang" in capsys.readouterr().out


def test_drift(healthy, capsys):
    healthy.setattr(fingerprints, "check", lambda: [fingerprints.Drift("sglang.x.f", "changed")])
    assert failed(report(capsys)) == {"host symbols": f"sglang.x.f is changed: reinstall sglang=={HOST_VERSION}"}


def test_a_wrong_option(healthy, capsys):
    healthy.setenv("SGLANG_ADAPTIVE_MIN_GAIN", "2")
    assert "must be a number from 0 to 1" in failed(report(capsys))["options"]


@pytest.mark.parametrize(("name", "value"), [("MIN_GAIN", "2"), ("MINGAIN", "0.1"), ("TRITON_RAGGED", "yes")])
def test_a_wrong_option_is_named_once(healthy, capsys, name, value):
    healthy.setattr(doctor, "_attention", ATTENTION)
    assert any(item["name"] == "attention" for item in report(capsys)["findings"])
    healthy.setenv(f"SGLANG_ADAPTIVE_{name}", value)
    result = report(capsys)
    assert [item["name"] for item in result["findings"] if f"SGLANG_ADAPTIVE_{name}" in item["text"]] == ["options"]
    assert list(failed(result)) == ["options"]
    assert result["verdict"] == "DSPARK_ADAPTIVE would not run here: see options."


def test_a_cache_folder_that_cannot_be_made(healthy, capsys):
    healthy.setenv("SGLANG_ADAPTIVE_CACHE_DIR", "/proc/nowhere")
    assert "SGLANG_ADAPTIVE_CACHE_DIR" in failed(report(capsys))["cache"]


def test_the_plugin_left_out(healthy, capsys):
    healthy.setenv("SGLANG_PLUGINS", "something_else")
    assert "leaves sglang_adaptive out" in failed(report(capsys))["plugin"]
    healthy.setenv("SGLANG_PLUGINS", "sglang_adaptive")
    result = report(capsys)
    assert failed(result) == {}
    assert any("leaves sglang_adaptive_cpu out" in item["text"] for item in result["findings"])


def test_the_plugin_not_installed(healthy, capsys):
    healthy.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert "sglang_adaptive_cpu is missing" in failed(report(capsys))["plugin"]


def test_a_step_that_breaks_is_a_failure_and_not_a_crash(healthy, capsys):
    def broken():
        raise RuntimeError("no such seam")
        yield

    healthy.setattr(doctor, "_seams", broken)
    assert failed(report(capsys)) == {"algorithm": "RuntimeError: no such seam"}


def test_a_plugin_that_hooks_our_targets(healthy):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from sglang_adaptive.guard.symbols import registers

    def nosy(result, *args, **kwargs):
        return result

    healthy.undo()
    target = next(patch.target for register in registers().values() for patch in register)
    source = HookSource("nosy", "nosy-dist")
    hooks = {
        target: [(HookType.AFTER, nosy, source)],
        "sglang.harmless.f": [(HookType.AFTER, nosy, source)],
        "sglang.ours.f": [(HookType.AFTER, doctor.main, None)],
    }
    healthy.setattr(HookRegistry, "_hooks", hooks)
    found = {finding.text.split(",")[0]: finding.ok for finding in doctor._others()}
    assert found == {f"nosy hooks {target}": False, "nosy hooks sglang.harmless.f": None}


def test_without_the_host_and_torch():
    root = str(Path(sglang_adaptive.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); sys.argv = ['x', 'doctor', '--json']\n"
    code += "from sglang_adaptive.__main__ import main; main()"
    command = [sys.executable, "-I", "-S", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    assert (
        failed(json.loads(result.stdout))["sglang"] == f"SGLang is not installed: pip install sglang=={HOST_VERSION}."
    )


def test_every_listed_backend_exists_in_the_host():
    """The table is about the pinned release: its names are those that the host registers, plus ours."""
    file = host.root() / "sglang/srt/layers/attention/attention_registry.py"
    registered = set(re.findall(r'@register_attention_backend\(\s*"(\w+)"', file.read_text(encoding="utf-8")))
    assert set(backends.CAPABILITY) - registered == {"adaptive_cpu", "flashinfer_mla"}
    assert set(backends.EFFECT) == set(backends.CAPABILITY.values())


def test_an_unknown_backend_is_taken_for_uniform():
    assert backends.capability("brand_new", False) == backends.UNIFORM
    assert backends.capability("flashinfer", False) == backends.EAGER
    assert backends.capability("flashinfer", True) == backends.GRAPHS


def test_an_unknown_command_says_how_to_call_it():
    result = subprocess.run(
        [sys.executable, "-m", "sglang_adaptive", "docter"], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 1 and result.stderr.startswith("usage: ")


def test_a_refusal_is_not_an_exception():
    assert not issubclass(AdaptiveError, Exception)
