"""The patch register, on a made-up host module: what an edit changes, and what it refuses."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap

import pytest

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.patches import registry
from sglang_adaptive.patches.registry import Edit, Patch, edited_source

HOST = '''
from __future__ import annotations

LIMIT = 10

def free(x: int) -> int:
    """Docstring."""
    y = x + 1  # one
    return min(y, LIMIT)

def other(x):
    return x * 2

class Base:
    def size(self):
        return 1

class Kind(Base):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def size(self):
        return super().size() + self.n

    @classmethod
    def make(cls, n):
        return cls(n)

    @staticmethod
    def double(n):
        return n * 2

def build():
    hidden = 5
    def inner(x):
        return x + hidden
    return inner

closure = build()
'''


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Module ``made_up_host``, ``made_up_user`` with ``from made_up_host import free``, and a clean register."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    (tmp_path / "made_up_host.py").write_text(textwrap.dedent(HOST))
    (tmp_path / "made_up_user.py").write_text("from made_up_host import free\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_applied", type(registry._applied)())
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    importlib.invalidate_caches()
    yield importlib.import_module("made_up_host"), importlib.import_module("made_up_user")
    for name in ("made_up_host", "made_up_user"):
        del sys.modules[name]


def edit(name: str, *pairs: tuple[str, str], **more) -> Patch:
    edits = tuple(Edit(old, new) for old, new in pairs)
    return Patch(f"made_up_host.{name}", why="test", remove_when="never", kind="edit", edits=edits, **more)


def test_each_text_must_stand_exactly_once():
    source = "a = 1\nb = 1\n"
    assert edited_source(source, (Edit("a = 1", "a = 2"), Edit("b = 1", "b = 3")), "t") == "a = 2\nb = 3\n"
    for text, count in (("= 1", 2), ("c", 0)):
        with pytest.raises(AdaptiveError, match=f"cannot patch t: .* stands there {count} times instead of once"):
            edited_source(source, (Edit(text, ""),), "t")


def test_the_new_source_differs_by_exactly_the_edit(hosts):
    host, user = hosts
    before = inspect.getsource(host.free)
    registry.apply([edit("free", ("x + 1", "x + 2"))])
    assert inspect.getsource(host.free) == before.replace("x + 1", "x + 2")
    assert host.free(1) == 3 and host.free(100) == 10
    assert user.free is host.free
    assert host.free.__doc__ == "Docstring." and host.free.__qualname__ == "free"
    assert host.free.__annotations__ == {"x": "int", "return": "int"}
    assert registry.applied() == ["made_up_host.free"]


def test_the_edited_function_lives_in_the_host_module(hosts):
    host, _ = hosts
    before = set(vars(host))
    registry.apply([edit("free", ("x + 1", "plus(x)"), names={"plus": lambda x: x + 3})])
    assert host.free(1) == 4
    host.LIMIT = 2
    assert host.free(1) == 2
    assert set(vars(host)) == before


def test_a_refused_edit_changes_nothing(hosts):
    host, _ = hosts
    before = host.free
    with pytest.raises(AdaptiveError, match=r"made_up_host\.free: the text 'gone'"):
        registry.apply([edit("free", ("gone", ""))])
    assert host.free is before and registry.applied() == []


def test_methods_of_every_kind(hosts):
    host, _ = hosts
    registry.apply(
        [
            edit("Kind.__init__", ("self.n = n", "self.n = n + 1")),
            edit("Kind.size", ("+ self.n", "+ 10 * self.n")),
            edit("Kind.make", ("cls(n)", "cls(n + 1)")),
            edit("Kind.double", ("n * 2", "n * 4")),
        ]
    )
    made = host.Kind.make(1)
    assert type(made) is host.Kind and made.n == 3 and made.size() == 31
    assert host.Kind.double(2) == 8 and made.double(2) == 8
    assert isinstance(vars(host.Kind)["make"], classmethod) and isinstance(vars(host.Kind)["double"], staticmethod)

    class Sub(host.Kind):
        def size(self):
            return super().size() + 1

    assert Sub.make(0).size() == 22


def test_a_closure_is_refused(hosts):
    with pytest.raises(AdaptiveError, match="it is a closure"):
        registry.apply([edit("closure", ("x + hidden", "x"))])


def test_two_patches_of_one_module_and_applying_twice(hosts):
    host, _ = hosts
    patches = [edit("free", ("x + 1", "x + 2")), edit("other", ("x * 2", "x * 3"))]
    registry.apply(patches)
    registry.apply(patches)
    assert (host.free(1), host.other(1)) == (3, 3)
    assert registry.applied() == ["made_up_host.free", "made_up_host.other"]


def test_two_patches_of_one_function_are_refused(hosts):
    registry.apply([edit("free", ("x + 1", "x + 2"))])
    with pytest.raises(AdaptiveError, match=r"two patches of made_up_host\.free"):
        registry.apply([edit("free", ("x + 2", "x + 3"))])


def test_a_hook_may_stand_around_an_edited_function_and_not_the_other_way(hosts):
    host, user = hosts
    hook = Patch("made_up_host.free", why="t", remove_when="t", hook=lambda call, x: 10 * call(x), kind="around")
    registry.apply([edit("free", ("x + 1", "x + 2"))])
    registry.apply([hook])
    registry.apply([hook])
    assert host.free(1) == user.free(1) == 30
    assert registry.applied() == ["made_up_host.free"]
    registry.refuse_foreign_hooks()
    hook = Patch("made_up_host.other", why="t", remove_when="t", hook=lambda call, x: call(x) + 1, kind="around")
    registry.apply([hook])
    with pytest.raises(AdaptiveError, match=r"two patches of made_up_host\.other"):
        registry.apply([edit("other", ("x * 2", "x * 3"))])


def test_a_hook_goes_through_the_hosts_registry(hosts):
    from sglang.srt.plugins.hook_registry import HookRegistry

    host, user = hosts
    patch = Patch("made_up_host.other", why="t", remove_when="t", hook=lambda call, x: call(x) + 1, kind="around")
    registry.apply([patch, edit("free", ("x + 1", "x + 5"))])
    assert host.other(1) == 3 and user.free(1) == 6
    assert HookRegistry._patched == {"made_up_host.other"}


def test_a_target_that_another_plugin_hooks_is_refused(hosts):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("made_up_host.free", lambda result, x: result, HookType.AFTER)
    with pytest.raises(AdaptiveError, match=r"Another SGLang plugin hooks made_up_host\.free"):
        registry.apply([edit("free", ("x + 1", "x + 2"))])


def test_a_hook_that_the_host_only_logs_as_failed_is_refused(hosts):
    patch = Patch("made_up_host.missing", why="t", remove_when="t", hook=lambda call: call(), kind="around")
    with pytest.raises(AdaptiveError, match=r"made_up_host\.missing did not take"):
        registry.apply([patch])


def test_a_later_hook_of_another_plugin_is_refused(hosts):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    registry.apply([edit("free", ("x + 1", "x + 2"), depends=("made_up_host.other",))])
    registry.refuse_foreign_hooks()
    source = HookSource("nosy", "nosy-dist")
    HookRegistry.register("made_up_host.other", lambda result, x: result, HookType.AFTER, source=source)
    with pytest.raises(AdaptiveError, match=r"plugin nosy hooks made_up_host\.other"):
        registry.refuse_foreign_hooks()


def test_a_refusal_ends_the_process_with_one_line():
    code = """
from sglang_adaptive.patches.registry import Edit, edited_source
try:
    edited_source("", (Edit("a", "b"),), "t")
except Exception:
    print("swallowed")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "cannot patch t" in result.stderr
