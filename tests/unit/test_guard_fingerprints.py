"""Fingerprints: what changes them, what does not, and what the plugin says about drift."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import textwrap

import pytest

from sglang_adaptive import HOST_VERSION
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.guard import fingerprints, host

BASE = '''
"""Module."""
from .other import helper as renamed
from .stars import *

LIMIT = 3
FLAG: bool = True

def free(a, b=1):
    """Docstring."""
    # a comment
    if a > b:
        return a
    return b

class Kind:
    """Docstring."""
    width: int = 4

    def method(self):
        return self.width + LIMIT

try:
    import fast
except ImportError:
    def fallback():
        return 1
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a package ``sglang`` under a folder; returns a function that replaces text in it."""
    package = tmp_path / "sglang"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sub" / "__init__.py").write_text("from .mod import free\n")
    (package / "sub" / "other.py").write_text("def helper():\n    return 7\n")
    (package / "sub" / "stars.py").write_text("def shining():\n    return 8\n")
    module = package / "sub" / "mod.py"
    module.write_text(textwrap.dedent(BASE))

    def change(old: str, new: str, path=module) -> None:
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    change.root = tmp_path
    monkeypatch.setattr(host, "root", lambda: tmp_path)
    monkeypatch.setattr(host, "version", lambda: HOST_VERSION)
    return change


SYMBOLS = [
    "sglang.sub.mod.LIMIT",
    "sglang.sub.mod.FLAG",
    "sglang.sub.mod.free",
    "sglang.sub.mod.Kind",
    "sglang.sub.mod.Kind.width",
    "sglang.sub.mod.Kind.method",
    "sglang.sub.mod.fallback",
    "sglang.sub.mod.renamed",
    "sglang.sub.mod.shining",
    "sglang.sub.free",
    "sglang.sub.other",
]


def _record(monkeypatch, tmp_path, symbols=SYMBOLS):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(fingerprints.record(symbols)))
    monkeypatch.setattr(fingerprints, "RECORD", path)


def _changed(before: dict, after: dict) -> set[str]:
    return {symbol.removeprefix("sglang.sub.") for symbol in before if before[symbol] != after[symbol]}


def test_every_symbol_is_found(install):
    found = fingerprints.compute(SYMBOLS, install.root)
    assert None not in found.values()
    assert found["sglang.sub.free"] == found["sglang.sub.mod.free"]
    assert len(set(found.values())) == len(SYMBOLS) - 1


CHANGES = [
    ("return a\n", "return a + 0\n", {"mod.free", "free"}),
    ("b=1", "b=2", {"mod.free", "free"}),
    ("LIMIT = 3", "LIMIT = 4", {"mod.LIMIT"}),
    ("FLAG: bool = True", "FLAG: bool = False", {"mod.FLAG"}),
    ("width: int = 4", "width: int = 5", {"mod.Kind", "mod.Kind.width"}),
    ("self.width + LIMIT", "self.width - LIMIT", {"mod.Kind", "mod.Kind.method"}),
    ("return 1", "return 2", {"mod.fallback"}),
    ("def fallback", "def gone", {"mod.fallback"}),
    ("helper as renamed", "helper", {"mod.renamed"}),
    ("    # a comment\n", "\n\n    # another\n", set()),
    ('def free(a, b=1):\n    """Docstring."""', 'def free(a, b=1):\n    """Other."""', set()),
    ('class Kind:\n    """Docstring."""', "class Kind:", set()),
    ("if a > b:", "if (a > b):", set()),
    ('"""Module."""', "", set()),
]


@pytest.mark.parametrize(("old", "new", "expected"), CHANGES)
def test_what_a_change_changes(install, old, new, expected):
    before = fingerprints.compute(SYMBOLS, install.root)
    install(old, new)
    assert _changed(before, fingerprints.compute(SYMBOLS, install.root)) == expected


def test_a_followed_name_is_the_one_where_it_is_defined(install):
    before = fingerprints.compute(SYMBOLS, install.root)
    install("return 7", "return 8", install.root / "sglang/sub/other.py")
    assert _changed(before, fingerprints.compute(SYMBOLS, install.root)) == {"mod.renamed", "other"}
    before = fingerprints.compute(SYMBOLS, install.root)
    install("return 8", "return 9", install.root / "sglang/sub/stars.py")
    assert _changed(before, fingerprints.compute(SYMBOLS, install.root)) == {"mod.shining"}


def test_fingerprint_is_the_same_on_every_python():
    # A constant of this test on purpose: a Python whose parser yields another tree for it would refuse every host.
    tree = ast.parse("def f(x: int, *, y=None) -> str:\n    'd'\n    return f'{x!r:>{y}} é' if y else u'no'\n")
    assert fingerprints.fingerprint([tree])[:16] == "06312cbe2ae518e4"


def test_no_drift_right_after_recording(install, monkeypatch, tmp_path):
    _record(monkeypatch, tmp_path)
    assert fingerprints.check() == []
    fingerprints.require()


def test_unchanged_files_are_not_parsed(install, monkeypatch, tmp_path):
    _record(monkeypatch, tmp_path)
    monkeypatch.setattr(fingerprints, "compute", None)
    assert fingerprints.check() == []


def test_a_moved_function_is_no_drift(install, monkeypatch, tmp_path):
    _record(monkeypatch, tmp_path)
    install('"""Module."""', '"""Module."""\nNEW = 1\n')
    assert fingerprints.check() == []


def test_drift_names_symbol_and_reason(install, monkeypatch, tmp_path):
    _record(monkeypatch, tmp_path)
    install("return a\n", "return a + 0\n")
    install("def fallback", "def gone")
    assert fingerprints.check() == [
        ("sglang.sub.free", "changed"),
        ("sglang.sub.mod.fallback", "missing"),
        ("sglang.sub.mod.free", "changed"),
    ]
    with pytest.raises(AdaptiveError, match=r"\.free \(changed\), .*fallback \(missing\).*--force-reinstall"):
        fingerprints.require()


def test_a_long_list_is_cut(install, monkeypatch, tmp_path):
    _record(monkeypatch, tmp_path)
    (install.root / "sglang/sub/mod.py").unlink()
    with pytest.raises(AdaptiveError, match=r"\(missing\) and 7 more;"):
        fingerprints.require()


def test_recording_an_unknown_symbol_is_refused(install):
    with pytest.raises(AdaptiveError, match=r"has no sglang\.sub\.mod\.nothing: correct"):
        fingerprints.record(["sglang.sub.mod.nothing"])
    with pytest.raises(AdaptiveError, match=r"has no sglang\.nowhere\.at\.all"):
        fingerprints.record(["sglang.nowhere.at.all"])


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(AdaptiveError, match=rf"0\.5\.24 is installed: pip install sglang=={HOST_VERSION}"):
        fingerprints.require()


def test_a_missing_host_is_refused(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for ask in (fingerprints.require, host.root):
        with pytest.raises(AdaptiveError, match="SGLang is not installed: pip install"):
            ask()


def test_the_host_is_not_imported():
    code = "import sys; from sglang_adaptive.guard import require; require(); print('sglang' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.strip() == "False"
