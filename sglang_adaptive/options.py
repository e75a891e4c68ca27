"""The plugin's options, their defaults, and the one place that reads them from the environment.

Every option is an environment variable ``SGLANG_ADAPTIVE_<NAME>`` and a flag ``--adaptive-<name>`` of
``python -m sglang_adaptive.launch serve``, which only sets the variable. The environment is what the server's child
processes inherit, so all of them read the same values.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_adaptive.errors import AdaptiveError

PREFIX = "SGLANG_ADAPTIVE_"
FLAG_PREFIX = "--adaptive-"


def _default_cache_dir() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "sglang_adaptive"


@dataclass(frozen=True)
class Options:
    """How the plugin behaves; no user needs to change any of it. ``RULES`` says what each option means.

    Lengths are in tokens of one request and one step and include the anchor, which is always verified: K drafts make
    lengths 1..K+1.
    """

    policy: bool = True
    min_gain: float = 0.01
    calibration: bool = True
    draft_features: bool = False
    cost_correction: bool = True
    skip_draft: bool = True
    narrow_drafts: bool = True
    min_verify_len: int = 1
    max_verify_len: int | None = None
    priority_weight: float = 0.0
    triton_ragged: bool = False
    profile: str = "on"
    profile_seconds: float = 30.0
    cache_dir: Path = field(default_factory=_default_cache_dir)
    trace: Path | None = None
    log_decisions: str = "summary"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Options:
        """Options in force under ``environ``.

        Raises AdaptiveError for a wrong value, for a variable with our prefix that is no option, and for a minimum
        verify length above the maximum.
        """
        names = {variable(name): name for name in RULES}
        unknown = sorted(key for key in environ if key.startswith(PREFIX) and key not in names)
        if unknown:
            closest = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.0)[0]
            raise AdaptiveError(f"{unknown[0]} is not an option of sglang_adaptive; the closest one is {closest}.")
        options = cls(**{name: _parse(name, environ[key]) for key, name in names.items() if key in environ})
        if options.max_verify_len is not None and options.min_verify_len > options.max_verify_len:
            raise AdaptiveError(
                f"Option min_verify_len ({variable('min_verify_len')}) is {options.min_verify_len}, but it must not be "
                f"above max_verify_len, which is {options.max_verify_len}."
            )
        return options

    def as_dict(self) -> dict[str, Any]:
        """Values by name, for logs and JSON: paths as text."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Rule:
    """One option's help, what it accepts (completes "it must be ..."), and text to value or ValueError."""

    help: str
    allowed: str
    parse: Callable[[str], Any]


def _switch(help: str) -> Rule:
    values = {"on": True, "off": False}

    def parse(text: str) -> bool:
        if text not in values:
            raise ValueError
        return values[text]

    return Rule(help, "on or off", parse)


def _choice(help: str, *names: str) -> Rule:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Rule(help, f"{', '.join(names[:-1])} or {names[-1]}", parse)


def _number(help: str, low: float, high: float) -> Rule:
    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError
        return value

    return Rule(help, f"a number from {low:g} to {high:g}", parse)


def _length(help: str) -> Rule:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= 1):
            raise ValueError
        return int(text)

    return Rule(help, "a whole number of tokens, 1 or more", parse)


def _folder(help: str) -> Rule:
    def parse(text: str) -> Path:
        path = Path(text).expanduser()
        if not text or (path.exists() and not path.is_dir()):
            raise ValueError
        return path.absolute()

    return Rule(help, "the path of a folder, or of one that can be created", parse)


def _file(help: str) -> Rule:
    def parse(text: str) -> Path | None:
        path = Path(text).expanduser()
        if text and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError
        return path.absolute() if text else None

    return Rule(help, "the path of a file in a folder that exists, or empty", parse)


RULES: dict[str, Rule] = {
    "policy": _switch("choose how many drafts to verify; off verifies every draft in every step"),
    "min_gain": _number("trim only for at least this much more output per ms, as a fraction", 0.0, 1.0),
    "calibration": _switch("correct the draft's confidences by what was accepted"),
    "draft_features": _switch("ask the draft's distributions, too, where it has a confidence head"),
    "cost_correction": _switch("correct the profiled step costs by measured step times"),
    "skip_draft": _switch("skip drafting in steps where it costs more than it brings"),
    "narrow_drafts": _switch("draft fewer tokens in steps where the draft costs more for all of them than they bring"),
    "min_verify_len": _length("fewest tokens that a request verifies in a step, the anchor included"),
    "max_verify_len": _length("most tokens that a request verifies in a step, the anchor included; unset: no limit"),
    "priority_weight": _number("how much a request's priority weighs when drafts are chosen; 0 ignores it", 0.0, 10.0),
    "triton_ragged": _switch("verify ragged batches with attention backend triton, which no GPU has run yet"),
    "profile": _choice(
        "time the steps at start-up; refresh ignores the cache, off verifies all", "on", "off", "refresh"
    ),
    "profile_seconds": _number("seconds that the profile may take", 0.5, 600.0),
    "cache_dir": _folder("where profiles of step costs are kept"),
    "trace": _file("file that records every decision; empty records nothing"),
    "log_decisions": _choice("log nothing, a line now and then, or a line per step", "off", "summary", "every"),
}


def variable(name: str) -> str:
    """The option's environment variable."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """The option's flag of ``python -m sglang_adaptive.launch serve``."""
    return FLAG_PREFIX + name.replace("_", "-")


def help_text(name: str) -> str:
    """One line: what the option does, what it accepts, and its default."""
    default = getattr(Options(), name)
    if isinstance(default, bool):
        default = "on" if default else "off"
    shown = "unset" if default is None else str(default).replace(str(Path.home()), "~")
    return f"{RULES[name].help} ({RULES[name].allowed}; default: {shown})"


def _parse(name: str, text: str) -> Any:
    try:
        return RULES[name].parse(text)
    except (ValueError, RuntimeError, OSError):  # the last two from paths: an unknown ~user, a name that is too long
        raise AdaptiveError(
            f"Option {name} ({variable(name)}, {flag(name)}) is {text!r}, but it must be {RULES[name].allowed}."
        ) from None
