"""How a host surface is patched, and the register of every patch.

A patch says what it changes, why, which host symbols it depends on (they are fingerprinted) and what would make it
unnecessary. There are two kinds. A *hook* wraps a function at its boundary through the host's own HookRegistry. A
*source edit* takes the host's own source of one function, replaces one declared piece of text, and compiles the result
in the host module's namespace: the new body differs from the host's by exactly the declared edit.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import linecache
import pkgutil
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.propagation import single_pass


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, which must stand exactly once in the host's function, by ``new``."""

    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    """One change to one host function.

    Attributes:
        target: dotted path of the host function, ``package.module.function`` or ``package.module.Class.method``.
        why: the reason, one or two sentences.
        remove_when: what would make it unnecessary.
        depends: further host symbols that it relies on.
        hook: for a hook, the function; called as the host's ``HookType`` named in ``kind`` says.
        kind: ``before``, ``after`` or ``around`` for a hook, ``edit`` for a source edit.
        edits: for a source edit, the replacements.
        names: for a source edit, further names that the new text uses.
    """

    target: str
    why: str
    remove_when: str
    depends: tuple[str, ...] = ()
    hook: Callable[..., Any] | None = None
    kind: str = "around"
    edits: tuple[Edit, ...] = ()
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every host symbol whose change would invalidate this patch."""
        return (self.target, *self.depends)


# By target and whether the source is edited: a hook may stand around an edited function.
_applied: dict[tuple[str, bool], Patch] = {}


def edited_source(source: str, edits: tuple[Edit, ...], target: str) -> str:
    """The host's function source with the declared edits. Raises AdaptiveError when one does not match exactly once."""
    for edit in edits:
        if source.count(edit.old) != 1:
            raise AdaptiveError(
                f"sglang_adaptive cannot patch {target}: the text {edit.old!r} stands there {source.count(edit.old)} "
                "times instead of once; reinstall the pinned SGLang release."
            )
        source = source.replace(edit.old, edit.new)
    return source


def _owner(target: str) -> tuple[Any, str, types.ModuleType]:
    path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(path)
    module = owner if isinstance(owner, types.ModuleType) else importlib.import_module(owner.__module__)
    return owner, name, module


def _apply_edit(patch: Patch) -> None:
    owner, name, module = _owner(patch.target)
    raw = inspect.getattr_static(owner, name)
    function = inspect.unwrap(raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw)
    if set(function.__code__.co_freevars) - {"__class__"}:
        raise AdaptiveError(f"sglang_adaptive cannot patch {patch.target}: it is a closure.")
    source = edited_source(textwrap.dedent(inspect.getsource(function)), patch.edits, patch.target)
    # The class cell of a zero-argument super() and the added names become cells of an enclosing function, so that
    # nothing is left behind in the host module.
    enclosing = ast.parse(f"def enclosing({', '.join(['__class__', *patch.names])}):\n    pass\n    return {name}")
    enclosing.body[0].body[0] = ast.parse(source).body[0]
    filename = f"<sglang_adaptive edit of {patch.target}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    scope: dict[str, Any] = {}
    exec(compile(enclosing, filename, "exec", flags, True), vars(module), scope)
    replacement = scope["enclosing"](owner, **patch.names)
    plain = replacement.__func__ if isinstance(replacement, classmethod | staticmethod) else replacement
    plain.__qualname__ = function.__qualname__
    _rebind(owner, name, raw, replacement)
    if inspect.getattr_static(owner, name) is not replacement:
        raise AdaptiveError(f"The patch of {patch.target} did not take: another plugin replaces it at the same time.")


def _rebind(owner: Any, name: str, old: Any, new: Any) -> None:
    """Set the attribute, and every binding that ``from module import name`` made of it."""
    from sglang.srt.plugins import hook_registry

    setattr(owner, name, new)
    if isinstance(owner, types.ModuleType):
        hook_registry._propagate_patch(old, new, owner)


def _apply_hook(patch: Patch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(patch.target, patch.hook, HookType(patch.kind))


def apply(patches: list[Patch]) -> None:
    """Apply each patch once in this process.

    Raises AdaptiveError when another plugin already hooks a target, or when a patch does not take: the host's
    registry only logs that.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    todo = [patch for patch in patches if _applied.get(_key(patch)) is not patch]
    for patch in todo:
        if _key(patch) in _applied or (patch.target, False) in _applied:
            raise AdaptiveError(f"sglang_adaptive declares two patches of {patch.target}: merge them into one.")
        if patch.target in HookRegistry._hooks or patch.target in HookRegistry._patched:
            raise AdaptiveError(
                f"Another SGLang plugin hooks {patch.target}, which sglang_adaptive needs unchanged: uninstall that "
                "plugin or exclude it with SGLANG_PLUGINS=sglang_adaptive,sglang_adaptive_cpu."
            )
    with single_pass():
        for patch in todo:
            _apply_edit(patch) if patch.edits else _apply_hook(patch)
            _applied[_key(patch)] = patch
        if any(patch.hook for patch in todo):
            HookRegistry.apply_hooks()
    for patch in todo:
        # The host only logs a hook that it could not apply.
        if patch.hook and patch.target not in HookRegistry._patched:
            raise AdaptiveError(f"The patch of {patch.target} did not take: see the log above and run the doctor.")


def refuse_foreign_hooks() -> None:
    """Raise AdaptiveError when another plugin hooks what a patch of ours targets or depends on.

    Plugins are loaded in any order, so this is asked again when the worker is built: the host silently drops a hook on
    a target that is already patched, and a hook on something that a patch depends on would change its meaning.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    ours = {id(patch.hook) for patch in _applied.values()}
    for symbol in {symbol for patch in _applied.values() for symbol in patch.symbols}:
        foreign = [source for _, hook, source in HookRegistry._hooks.get(symbol, ()) if id(hook) not in ours]
        if foreign:
            name = getattr(foreign[0], "plugin_name", "unknown")
            raise AdaptiveError(
                f"The SGLang plugin {name} hooks {symbol}, which sglang_adaptive needs unchanged: uninstall it, or "
                "exclude it with SGLANG_PLUGINS=sglang_adaptive,sglang_adaptive_cpu."
            )


def applied() -> list[str]:
    """Targets patched in this process, sorted."""
    return sorted({target for target, _ in _applied})


def _key(patch: Patch) -> tuple[str, bool]:
    return patch.target, bool(patch.edits)
