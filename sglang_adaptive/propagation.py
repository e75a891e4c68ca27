"""One walk over the loaded modules for many patches, where the host walks once for each of them.

What ``from module import name`` has bound is replaced in every module, which means a look at all that every module
holds: a tenth of a second, and there are dozens of patches, in each process of the server.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def single_pass() -> Iterator[None]:
    """Inside, the host's registry and ours only note what has to be replaced; at the end it is, all at once."""
    from sglang.srt.plugins import hook_registry

    noted: list[tuple[Any, Any, Any]] = []  # old, new, and where the registry has set the new one itself

    def note(original: Any, wrapped: Any, source_module: Any) -> int:
        noted.append((original, wrapped, source_module))
        return 0

    host = hook_registry._propagate_patch
    hook_registry._propagate_patch = note
    try:
        yield
    finally:
        hook_registry._propagate_patch = host
        _replace_everywhere(noted)


def _replace_everywhere(noted: list[tuple[Any, Any, Any]]) -> None:
    latest: dict[
        int, tuple[Any, Any]
    ] = {}  # by the id of what modules hold: what they are to hold, and where it is set
    for original, wrapped, source_module in noted:
        for key, (value, source) in latest.items():
            if value is original:  # a patch has been patched in its turn
                latest[key] = wrapped, source
        latest[id(original)] = wrapped, source_module
    for module in list(sys.modules.values()) if noted else ():
        if isinstance(module, types.ModuleType):
            for name, value in [each for each in list(vars(module).items()) if id(each[1]) in latest]:
                replacement, source_module = latest[id(value)]
                if source_module is not module:
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(module, name, replacement)
