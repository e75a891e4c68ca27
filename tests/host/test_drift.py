"""The installed host is the one the plugin was written for, and everything it touches there is recorded."""

from __future__ import annotations

import ast
import json
import textwrap
import time

import pytest

from sglang_adaptive.guard import fingerprints, host
from sglang_adaptive.guard.symbols import registers, symbols
from sglang_adaptive.patches.registry import edited_source

REGISTERS = registers()
PATCHES = [patch for register in REGISTERS.values() for patch in register]
AGAIN = "record it with python -m sglang_adaptive.guard record, and look at the difference"


def test_the_host_is_the_recorded_one():
    fingerprints.require()
    assert fingerprints.check() == []


def test_what_is_recorded_is_what_the_plugin_touches():
    recorded = json.loads(fingerprints.RECORD.read_text())["symbols"]
    touched = set(symbols())
    assert touched - set(recorded) == set(), f"not recorded: {AGAIN}"
    assert set(recorded) - touched == set(), f"no longer touched: {AGAIN}"


def test_the_fingerprints_agree_with_the_files():
    recorded = json.loads(fingerprints.RECORD.read_text())["symbols"]
    assert fingerprints.compute(recorded, host.root()) == recorded


def test_the_check_is_fast():
    """At start-up it reads files only: under 300 ms on one core. With changed files it parses: well under 10 s."""
    fingerprints.check()
    start = time.process_time()
    fingerprints.check()
    assert time.process_time() - start < 0.3


def _source(target: str) -> str:
    nodes, paths = fingerprints.Source(host.root()).locate(target)
    assert len(nodes) == 1, f"{target} is defined {len(nodes)} times"
    node = nodes[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = paths[-1].read_text(encoding="utf-8").splitlines(keepends=True)[first - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines))


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.edits], ids=lambda patch: patch.target)
def test_each_edit_matches_once_and_changes_that_only(patch):
    before = _source(patch.target)
    after = edited_source(before, patch.edits, patch.target)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    for edit in reversed(patch.edits):
        assert after.count(edit.new) == 1 or edit.new == ""
        after = after.replace(edit.new, edit.old) if edit.new else before
    assert after == before


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_each_patch_explains_itself(patch):
    assert (patch.hook is None) == (patch.kind == "edit") == bool(patch.edits)
    assert patch.kind in ("edit", "before", "after", "around")
    assert len(patch.why.split()) >= 5 and len(patch.remove_when.split()) >= 4


def test_no_function_is_patched_twice():
    """A hook may stand around an edited function."""
    targets = [(patch.target, patch.kind == "edit") for patch in PATCHES]
    assert len(targets) == len(set(targets))
