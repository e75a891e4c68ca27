"""What a sweep compares: read from a TOML or JSON file. ``configs/`` has examples with every field explained."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_adaptive.errors import AdaptiveError

ROLES = ("none", "fixed", "compact", "ours", "other")


@dataclass(frozen=True)
class Prepare:
    """A file that an arm needs: made by ``command`` ("{url}" and "{file}" filled in) against a server with these
    ``args`` and ``env``, once."""

    file: str
    command: list[str]
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    timeout: float = 300.0


@dataclass(frozen=True)
class Arm:
    """One server set-up. ``role`` tells the report what to compare: none, fixed, compact, ours or other.
    ``warmup_seconds`` replaces the sweep's."""

    name: str
    role: str = "other"
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    prepare: Prepare | None = None
    warmup_seconds: float | None = None


@dataclass(frozen=True)
class Trace:
    """Profiler traces to take in the first repeat: at these concurrencies, over so many steps."""

    concurrency: list[int]
    steps: int = 40


@dataclass(frozen=True)
class Sweep:
    """A whole sweep; see the example configurations for the meaning of each field."""

    name: str
    arms: list[Arm]
    prompts: dict[str, Any]
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    server: list[str] = field(default_factory=lambda: [sys.executable, "-m", "sglang.launch_server"])
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 8, 16, 32, 64, 128, 256])
    repeats: int = 3
    seconds: float = 8.0
    min_seconds: float = 3.0
    warmup_seconds: float = 3.0
    warmup_concurrency: list[int] = field(default_factory=list)
    resident: int = 1
    restart: bool | None = None
    pause_idle: bool = False
    output_tokens: list[int] = field(default_factory=lambda: [96, 160])
    batches: bool = False
    temperature: float = 1.0
    stream_interval: int = 32
    seed: int = 0
    port: int = 0
    start_timeout: float = 600.0
    start_estimate: float = 90.0
    trace: Trace | None = None
    acceptance: str | None = None

    @property
    def restarts(self) -> bool:
        """Whether servers start anew for each repeat: by default unless all arms are alive at the same time."""
        return self.resident < len(self.arms) if self.restart is None else self.restart


def read(path: Path) -> Sweep:
    """A sweep from ``path``, with ``$NAME`` in strings replaced from the environment.

    ``acceptance`` names a file beside it or in ``acceptance_files``: the servers of all arms then simulate acceptance
    (see acceptance.py). Raises AdaptiveError for a field that does not exist, is missing, or names no role.
    """
    text = path.read_text()
    data = _expand(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    arms = []
    for arm in data.pop("arms", []):
        prepare = arm.pop("prepare", None)
        arms.append(_build(Arm, {**arm, "prepare": _build(Prepare, prepare) if prepare else None}))
    trace = data.pop("trace", None)
    if "acceptance" in data:
        from sglang_adaptive.benchmarks import acceptance  # torch: for those who need it

        data["acceptance"] = str(_acceptance_file(data["acceptance"], path.parent))
        data.setdefault("server", [sys.executable, "-m", "sglang_adaptive.benchmarks.acceptance_server"])
        data["env"] = {**data.get("env", {}), acceptance.VARIABLE: data["acceptance"]}
    sweep = _build(Sweep, {**data, "arms": arms, "trace": _build(Trace, trace) if trace else None})
    names = [arm.name for arm in sweep.arms]
    if not names or len(set(names)) < len(names):
        raise AdaptiveError(f"{path} needs at least one [[arms]], each with a name of its own.")
    for arm in sweep.arms:
        if arm.role not in ROLES:
            raise AdaptiveError(f"Arm {arm.name} has role {arm.role!r}; it must be one of {', '.join(ROLES)}.")
    return sweep


def _acceptance_file(name: str, folder: Path) -> Path:
    for place in (folder, Path(__file__).parent / "acceptance_files"):
        if (place / name).is_file():
            return (place / name).absolute()
    raise AdaptiveError(f"{name} for simulated acceptance is neither in {folder} nor in acceptance_files.")


def _build(kind: type[Any], values: dict[str, Any]) -> Any:
    known = {item.name for item in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise AdaptiveError(f"{unknown[0]} is no field of {kind.__name__}; it has {', '.join(sorted(known))}.")
    try:
        return kind(**values)
    except TypeError as error:
        raise AdaptiveError(f"{kind.__name__} in the sweep's file is incomplete: {error}.") from None


def _expand(value: Any) -> Any:
    if isinstance(value, str):
        expanded = os.path.expandvars(value)
        if "$" in expanded:
            raise AdaptiveError(f"{value!r} in the sweep's file names a variable that is not set in the environment.")
        return expanded
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if isinstance(value, dict):
        return {key: _expand(item) for key, item in value.items()}
    return value
