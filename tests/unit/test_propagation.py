"""Many patches with one walk over the modules leave what the host's walks leave, one for each."""

from __future__ import annotations

import sys
import types

import pytest
from sglang.srt.plugins import hook_registry

from sglang_adaptive.propagation import single_pass

OLD_A, OLD_B, NEW_A, NEWER_A, NEW_B = range(5)


@pytest.fixture
def modules():
    """``source`` has an alias of its own, ``user`` and ``other`` have imported from it; and five functions."""
    # In a list: what a module of this test held would be replaced, too.
    functions = [lambda number=number: number for number in range(5)]
    a, b = functions[:2]
    made = {name: types.ModuleType(f"made_up_{name}") for name in ("source", "user", "other")}
    vars(made["source"]).update(a=a, b=b, alias=a)
    vars(made["user"]).update(a=a, renamed=b, number=1)
    vars(made["other"]).update(b=b, also=a)
    sys.modules.update({module.__name__: module for module in made.values()})
    yield made, functions
    for module in made.values():
        del sys.modules[module.__name__]


def patch(made, functions):
    """As the registries do it: two patches, a third one of what the first has put there, and one taken back."""
    for name, old, new in (
        ("a", OLD_A, NEW_A),
        ("b", OLD_B, NEW_B),
        ("a", NEW_A, NEWER_A),
        ("b", NEW_B, OLD_B),
    ):
        setattr(made["source"], name, functions[new])
        hook_registry._propagate_patch(functions[old], functions[new], made["source"])


def contents(made):
    return {name: dict(vars(module)) for name, module in made.items()}


def test_one_walk_does_what_the_hosts_do(modules, monkeypatch):
    made, functions = modules
    monkeypatch.setitem(sys.modules, "made_up_none", None)
    before = contents(made)
    patch(made, functions)
    wanted = contents(made)
    assert wanted["user"]["a"] is functions[NEWER_A] and wanted["source"]["alias"] is functions[OLD_A]
    for name, module in made.items():
        vars(module).update(before[name])
    with single_pass():
        patch(made, functions)
        assert made["user"].a is functions[OLD_A]
    assert contents(made) == wanted


def test_the_hosts_own_walk_is_back_after_an_error_and_what_was_noted_is_done(modules):
    made, functions = modules
    host = hook_registry._propagate_patch
    with pytest.raises(ValueError, match="broken"), single_pass():
        patch(made, functions)
        raise ValueError("broken")
    assert hook_registry._propagate_patch is host
    assert made["other"].also is functions[NEWER_A]
