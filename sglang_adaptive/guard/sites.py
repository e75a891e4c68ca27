"""Every place of the host that asks which speculative algorithm runs, found in its installed source.

DSPARK_ADAPTIVE must behave like its drafter family at each of them. The plugin declares the family in the first step of
the host's argument resolution, so a place that reads the resolved value sees "DSPARK" and is right by itself; a place
that reads the raw record (``server_args.speculative_algorithm``) sees "DSPARK_ADAPTIVE" and must be judged by a person.
``sites.json`` holds the places of the pinned release, names and counts only; a test compares it with the installation.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sglang_adaptive.guard import host

RECORD = Path(__file__).with_name("sites.json")
DEFINITIONS = ("sglang/srt/speculative/spec_info.py", "sglang/srt/speculative/spec_registry.py")
FIELD = "speculative_algorithm"
ALIASES = ("NEXTN",)

# How a place receives the algorithm.
BAG = "bag"  # the published configuration, get_spec()
RESOLVED = "resolved"  # a view over the declarations so far, resolving_view() or resolved_view()
OBJECT = "object"  # a SpeculativeAlgorithm, or a copy of the name, that was made from one of these elsewhere
PASSED = "passed"  # a parameter or a value from elsewhere: whoever passes it decides
RAW = "raw"  # the record itself

# Places that read RAW or PASSED, or that name the field in a string: a person traced why each is right.
JUDGED = {
    "sglang/api/v1/api_types.py::decode_DeploymentInfo": "a report for clients",
    "sglang/api/v1/api_types.py::encode_DeploymentInfo": "a report for clients",
    "sglang/benchmark/dspark_sps_profiler.py::fetch_server_context": "a client tool for stock tables",
    "sglang/srt/arg_groups/field_order.py::<module>": "the order of the constructor's arguments",
    "sglang/srt/arg_groups/mega_moe_hook.py::flydsl_decode_tokens_per_rank": "passed a resolving view by its hook",
    "sglang/srt/arg_groups/mega_moe_hook.py::mega_moe_decode_tokens_per_rank": "passed a resolving view by its hook",
    "sglang/srt/arg_groups/validation_hook.py::check_pipeline_parallel_compat": "passed a resolving view by its caller",
    "sglang/srt/kernel_plugins/amd/binding.py::<module>": "probes, passed handle_amd_monokernel's resolving view",
    "sglang/srt/kernel_plugins/amd/binding.py::_ragged_verify": "passed handle_amd_monokernel's resolving view",
    "sglang/srt/kernel_plugins/nvidia/binding.py::<module>": "probes, passed handle_nvidia_megakernel's resolving view",
    "sglang/srt/kernel_plugins/nvidia/binding.py::_ragged_verify": "passed handle_nvidia_megakernel's resolving view",
    "sglang/srt/model_executor/model_runner_components/startup_weight_load.py::"
    "StartupWeightLoadManager._get_unsupported_reason": "options filled from get_spec()",
    "sglang/srt/rust_server/config.py::_build_server_args": "a report for clients, filled from get_spec()",
}

_MAKERS = {"get_spec": BAG, "get_spec_config": BAG, "resolving_view": RESOLVED, "resolved_view": RESOLVED}
_VAGUE = {"is_none", "is_some", "need_topk", "register", "create_worker", "handle_server_args", "is_speculative"}

Site = dict[str, dict[str, int]]


def algorithm_names(root: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the host's built-in algorithms, and of the methods with which it asks about one."""
    tree = ast.parse((root / DEFINITIONS[0]).read_bytes())
    algorithm = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeAlgorithm")
    names = {t.id for n in algorithm.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    methods = {n.name for n in algorithm.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
    return frozenset(names - {"NONE"} | set(ALIASES)), frozenset(methods)


class _Scope:
    """Names of one function (or module) and how each receives a configuration."""

    def __init__(self, label: str, outer: _Scope | None):
        self.label = label
        self.outer = outer
        self.names: dict[str, str] = {}

    def lookup(self, name: str) -> str | None:
        if name in self.names:
            return self.names[name]
        return self.outer.lookup(name) if self.outer else None


class _Walker(ast.NodeVisitor):
    def __init__(self, file: str, names: frozenset[str], methods: frozenset[str]):
        self.file = file
        self.algorithm_names = names
        self.methods = methods
        self.scope = _Scope("<module>", None)
        self.asks: dict[str, Counter[str]] = {}
        self.receives: dict[str, Counter[str]] = {}

    def _note(self, ask: str, received: str | None = None) -> None:
        self.asks.setdefault(self.scope.label, Counter())[ask] += 1
        if received:
            self.receives.setdefault(self.scope.label, Counter())[received] += 1

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.scope
        self.scope = _Scope(node.name if outer.outer is None else f"{outer.label}.{node.name}", outer)
        if not isinstance(node, ast.ClassDef):
            arguments = node.args
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                self.scope.names[argument.arg] = _parameter(argument)
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        self.scope = outer

    visit_ClassDef = _enter
    visit_FunctionDef = _enter
    visit_AsyncFunctionDef = _enter

    def visit_Lambda(self, node: ast.Lambda) -> None:
        outer = self.scope
        self.scope = _Scope(outer.label, outer)
        self.scope.names = {argument.arg: _parameter(argument) for argument in node.args.args}
        self.generic_visit(node)
        self.scope = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                received = self._origin(value)
                if isinstance(name, ast.Name) and received:
                    self.scope.names[name.id] = received

    def _origin(self, node: ast.expr) -> str | None:
        """How the configuration (or the algorithm) that an expression stands for was received."""
        if isinstance(node, ast.Call):
            called = _last(node.func)
            if called in _MAKERS:
                return _MAKERS[called]
            if called == "from_string" and node.args:
                return self._field(node.args[0]) or PASSED
        if isinstance(node, ast.Name):
            return self.scope.lookup(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr == FIELD:
                return self._field(node)
            return RAW if node.attr in ("server_args", "args") else OBJECT
        return None

    def _field(self, node: ast.expr) -> str | None:
        """How the field in an expression such as ``(cfg.speculative_algorithm or "").upper()`` was received."""
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and part.attr == FIELD:
                if isinstance(part.value, ast.Name) and part.value.id == "self":
                    return OBJECT
                return self._origin(part.value) or PASSED
        return self._origin(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == FIELD and isinstance(node.ctx, ast.Load):
            self._note("field", self._field(node))
        elif node.attr in self.algorithm_names and _last(node.value) == "SpeculativeAlgorithm":
            self._note(f"member {node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in self.methods:
            if function.attr == "from_string":
                if _last(function.value) == "SpeculativeAlgorithm":
                    self._note("from_string", self._field(node.args[0]) if node.args else None)
            elif function.attr not in _VAGUE or "alg" in (_last(function.value) or "").lower():
                self._note(f"{function.attr}()", self._origin(function.value) or OBJECT)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.upper() in self.algorithm_names:
            self._note(f"name {node.value}")
        elif node.value == FIELD:
            self._note("key")

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)


def _parameter(argument: ast.arg) -> str:
    note = ast.unparse(argument.annotation) if argument.annotation else ""
    if argument.arg == "server_args" or "ServerArgs" in note:
        return RAW
    if argument.arg == "view" or "Resolv" in note:
        return RESOLVED
    return OBJECT if "alg" in argument.arg or "SpeculativeAlgorithm" in note else PASSED


def _last(node: ast.expr) -> str | None:
    """Last identifier of a dotted expression or of the call of one."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def walk(root: Path | None = None) -> dict[str, Site]:
    """Every site, as ``{"file::qualname": {"asks": {kind: count}, "receives": {how: count}}}``."""
    root = root or host.root()
    names, methods = algorithm_names(root)
    spellings = [*names, *(name.lower() for name in names)]
    quoted = [f"{quote}{name}{quote}" for name in spellings for quote in "'\""]
    wanted = [FIELD, "SpeculativeAlgorithm", *quoted, *(f".{method}(" for method in methods)]
    result: dict[str, Site] = {}
    for path in _sources(root):
        source = path.read_text(encoding="utf-8")
        if not any(text in source for text in wanted):
            continue
        file = path.relative_to(root).as_posix()
        walker = _Walker(file, names, methods)
        walker.visit(ast.parse(source))
        for label, asks in walker.asks.items():
            result[f"{file}::{label}"] = {
                "asks": dict(sorted(asks.items())),
                "receives": dict(sorted(walker.receives.get(label, Counter()).items())),
            }
    return dict(sorted(result.items()))


def _sources(root: Path) -> Iterator[Path]:
    package = root / host.PACKAGE
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(root).as_posix()
        if path.relative_to(package).parts[0] != "test" and inside not in DEFINITIONS:
            yield path


def to_judge(sites: dict[str, Site]) -> set[str]:
    """Sites that do not read a resolved value by themselves, so that somebody has to look at who feeds them."""
    return {name for name, site in sites.items() if {RAW, PASSED} & set(site["receives"]) or "key" in site["asks"]}


def recorded() -> dict[str, Site]:
    """The sites of the pinned release."""
    sites: dict[str, Site] = json.loads(RECORD.read_text())
    return sites
