"""Fingerprints of host symbols, computed from the installed source without importing it.

A fingerprint is the SHA-256 of a symbol's syntax tree without positions, comments and docstrings: moving or
documenting a function does not change it, a changed body does. A signature alone says too little, most releases change
bodies only.

``fingerprints.json`` holds the fingerprint of every symbol that a patch changes or that the plugin relies on, and the
SHA-256 of each file that defines one: nothing is parsed while the files are byte for byte the recorded ones, and the
check at start-up takes milliseconds.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_adaptive import HOST_VERSION
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.guard import host

RECORD = Path(__file__).with_name("fingerprints.json")


class Drift(NamedTuple):
    """A symbol that is not what was recorded; ``reason`` is "changed" or "missing"."""

    symbol: str
    reason: str


def canonical(node: object) -> Iterator[str]:
    """Tokens of a syntax tree that any Python from 3.11 on produces alike.

    ``ast.dump`` differs between Python releases: fields that are empty are left out here, and so are ``kind`` (the u of
    u"") and docstrings.
    """
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name != "kind" and value is not None and value != []:
                yield f" {name}="
                yield from canonical(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            if not _is_text(item):
                yield from canonical(item)
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!a}"


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        targets = [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
        return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class body, those under its ``if``, ``try`` and ``with`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def find(tree: ast.Module, path: Iterable[str]) -> list[ast.AST]:
    """Nodes that define the dotted path within a module; several when it is defined conditionally or overloaded."""
    found: list[ast.AST] = [tree]
    for name in path:
        bodies = [node.body for node in found if isinstance(node, ast.Module | ast.ClassDef)]
        found = [node for body in bodies for node in _statements(body) if _binds(node, name)]
    return found


def fingerprint(nodes: list[ast.AST]) -> str:
    """SHA-256 over the nodes, as hexadecimal."""
    digest = hashlib.sha256()
    for node in nodes:
        digest.update("".join(canonical(node)).encode())
    return digest.hexdigest()


class Source:
    """Parsed source files of one installation."""

    def __init__(self, root: Path):
        self.root = root
        self.trees: dict[Path, ast.Module] = {}

    def _file(self, parts: list[str]) -> Path | None:
        base = self.root.joinpath(*parts)
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    def locate(self, symbol: str) -> tuple[list[ast.AST], list[Path]]:
        """Nodes that define a symbol, none where it does not exist, and the files that say so.

        A name that its module imports is followed to where it is defined.
        """
        parts = symbol.split(".")
        for count in range(len(parts), 0, -1):
            path = self._file(parts[:count])
            if path is not None:
                break
        else:
            return [], []
        if path not in self.trees:
            self.trees[path] = ast.parse(path.read_bytes())
        inner = parts[count:]
        nodes = find(self.trees[path], inner)
        if nodes or not inner:
            return nodes, [path]
        package = parts[:count] if path.name == "__init__.py" else parts[: count - 1]
        for node in _statements(self.trees[path].body):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                home = [*base, *(node.module.split(".") if node.module else [])]
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == inner[0]:
                        rest = inner if alias.name == "*" else [alias.name, *inner[1:]]
                        nodes, paths = self.locate(".".join([*home, *rest]))
                        if nodes:
                            return nodes, [path, *paths]
        return [], [path]


def compute(symbols: Iterable[str], root: Path) -> dict[str, str | None]:
    """Fingerprint of each symbol in the installation under ``root``; None where it does not exist."""
    source = Source(root)
    located = {symbol: source.locate(symbol)[0] for symbol in symbols}
    return {symbol: fingerprint(nodes) if nodes else None for symbol, nodes in located.items()}


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(symbols: Iterable[str]) -> dict[str, dict[str, str]]:
    """The content of ``fingerprints.json`` for the installed host. Raises AdaptiveError for a symbol it lacks."""
    root = host.root()
    source = Source(root)
    prints: dict[str, str] = {}
    files: dict[str, str] = {}
    for symbol in sorted(set(symbols)):
        nodes, paths = source.locate(symbol)
        if not nodes:
            raise AdaptiveError(f"SGLang {host.version()} has no {symbol}: correct the patch or guard/relied_on.py.")
        prints[symbol] = fingerprint(nodes)
        files.update({path.relative_to(root).as_posix(): _file_hash(path) for path in paths})
    return {"symbols": prints, "files": dict(sorted(files.items()))}


def check(root: Path | None = None) -> list[Drift]:
    """Recorded symbols that the installation (by default the one that would be imported) has changed or lacks."""
    root = root or host.root()
    recorded = json.loads(RECORD.read_text())
    if all(_matches(root / name, value) for name, value in recorded["files"].items()):
        return []
    found = compute(recorded["symbols"], root)
    return [
        Drift(symbol, "missing" if found[symbol] is None else "changed")
        for symbol, value in recorded["symbols"].items()
        if found[symbol] != value
    ]


def _matches(path: Path, recorded: str) -> bool:
    return path.is_file() and _file_hash(path) == recorded


def require() -> None:
    """Raise AdaptiveError unless the host is the pinned release with every symbol as recorded."""
    host.require_version()
    drift = check()
    if drift:
        shown = ", ".join(f"{item.symbol} ({item.reason})" for item in drift[:3])
        more = f" and {len(drift) - 3} more" if len(drift) > 3 else ""
        raise AdaptiveError(
            f"The installed SGLang {HOST_VERSION} is not the released one where sglang_adaptive touches it: "
            f"{shown}{more}; reinstall it with pip install --force-reinstall --no-deps sglang=={HOST_VERSION}."
        )
