"""Every host symbol that the plugin patches, imports or otherwise relies on."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sglang_adaptive
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.guard import host
from sglang_adaptive.guard.relied_on import RELIED_ON

NOT_A_REGISTER = ("registry",)


def registers() -> dict[str, list[Any]]:
    """``PATCHES`` of each module of ``sglang_adaptive.patches``, by module name. Imports these modules."""
    from sglang_adaptive import patches

    result = {}
    for module in pkgutil.iter_modules(patches.__path__):
        if module.name not in NOT_A_REGISTER and not module.name.startswith("_"):
            register = getattr(importlib.import_module(f"{patches.__name__}.{module.name}"), "PATCHES", None)
            if register is None:
                raise AdaptiveError(f"patches/{module.name}.py has no list PATCHES: add it, see patches/registry.py.")
            result[module.name] = register
    return result


def imported(source: str, root: Path) -> set[str]:
    """Host names that a module's source imports, those for type checking only left out.

    Of an imported host module the attributes that the source uses are meant, not the module as a whole.
    """
    names: set[str] = set()
    modules: dict[str, str] = {}
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            modules.update({a.asname: a.name for a in node.names if a.asname and _is_host(a.name)})
        if isinstance(node, ast.ImportFrom) and _is_host(node.module or ""):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                base = root.joinpath(*name.split("."))
                if base.with_suffix(".py").is_file() or base.is_dir():
                    modules[alias.asname or alias.name] = name
                else:
                    names.add(name)
        stack.extend(ast.iter_child_nodes(node))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add(f"{modules[node.value.id]}.{node.attr}")
    return names


def _is_host(module: str) -> bool:
    return module.split(".")[0] == host.PACKAGE


def sources() -> Iterator[Path]:
    """Source files of the plugin that run in the host's processes."""
    from sglang_adaptive import patches

    package = Path(sglang_adaptive.__file__).parent
    for folder in (package, *patches.__path__):
        for path in sorted(Path(folder).rglob("*.py")):
            if path.parent != package / "guard":
                yield path


def symbols() -> list[str]:
    """Dotted host names, sorted: of all patches, of all imports, and of ``RELIED_ON``."""
    root = host.root()
    found = set(RELIED_ON)
    for register in registers().values():
        for patch in register:
            found.update(patch.symbols)
    for path in sources():
        found |= imported(path.read_text(encoding="utf-8"), root)
    return sorted(found)
