"""``python -m sglang_adaptive doctor``: would DSPARK_ADAPTIVE run here, and what would it do?"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from sglang_adaptive import ALGORITHM, HOST_VERSION, __version__
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.guard import backends, fingerprints, host
from sglang_adaptive.options import Options, variable
from sglang_adaptive.platform_cpu import ATTENTION_BACKEND

GENERAL_GROUP = "sglang.srt.plugins"
PLATFORM_GROUP = "sglang.srt.platforms"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``ok`` is None for a line that only informs."""

    name: str
    text: str
    ok: bool | None = None


def diagnose() -> list[Finding]:
    """All findings, in the order in which they are printed. Imports the host if it is the pinned release."""
    findings = [
        Finding("sglang_adaptive", __version__),
        Finding("python", f"{platform.python_version()} on {platform.machine()}"),
        _torch(),
    ]
    findings += [*_guarded("options", _options), *_guarded("sglang", _host)]
    if findings[-1].ok:
        for name, step in (
            ("host symbols", _symbols),
            ("plugin", _entry_points),
            ("algorithm", _seams),
            ("other plugins", _others),
            ("platform", _platform),
            ("attention", _attention),
        ):
            findings += _guarded(name, step)
    return findings


def _guarded(name: str, step: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The step's findings; what it raises becomes one that failed."""
    try:
        return list(step())
    except AdaptiveError as error:
        return [Finding(name, str(error).removeprefix("sglang_adaptive: "), False)]
    except Exception as error:
        return [Finding(name, f"{type(error).__name__}: {error}", False)]


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", f"cannot be imported ({error}): install it", False)
    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            found.append(f"{torch.cuda.get_device_name(index)} (sm{major}{minor})")
        return Finding(
            "torch", f"{torch.__version__}, CUDA {torch.version.cuda or torch.version.hip}: {', '.join(found)}"
        )
    return Finding("torch", f"{torch.__version__}, no CUDA device, {len(os.sched_getaffinity(0))} CPU cores")


def _options() -> Iterator[Finding]:
    options = Options.from_env()
    yield Finding("options", " ".join(f"{name}={value}" for name, value in options.as_dict().items()), True)
    folder = options.cache_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            yield Finding("cache", f"{folder} is writable", True)
    except OSError as error:
        advice = f"name another folder in {variable('cache_dir')}"
        yield Finding("cache", f"{folder} is not writable ({error.strerror}): {advice}", False)


def _host() -> Iterator[Finding]:
    host.require_version()
    yield Finding("sglang", f"{host.version()} in {host.root() / host.PACKAGE}, the release that is needed", True)


def _symbols() -> Iterator[Finding]:
    drift = fingerprints.check()
    count = len(json.loads(fingerprints.RECORD.read_text())["symbols"])
    for item in drift:
        yield Finding("host symbols", f"{item.symbol} is {item.reason}: reinstall sglang=={HOST_VERSION}", False)
    if not drift:
        yield Finding("host symbols", f"{count} that the plugin touches are as recorded", True)


def _entry_points() -> Iterator[Finding]:
    for group, ours in ((GENERAL_GROUP, "sglang_adaptive"), (PLATFORM_GROUP, "sglang_adaptive_cpu")):
        names = sorted({point.name for point in importlib.metadata.entry_points(group=group)})
        allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
        text = f"{group}: {', '.join(names) or 'none'}"
        if ours not in names:
            yield Finding("plugin", f"{text}; {ours} is missing: install sglang-adaptive again", False)
        elif allowed and ours not in allowed and group == GENERAL_GROUP:
            yield Finding("plugin", f"{text}; SGLANG_PLUGINS leaves {ours} out: add it there", False)
        elif allowed and ours not in allowed:
            yield Finding("plugin", f"{text}; SGLANG_PLUGINS leaves {ours} out, which serves without an accelerator")
        else:
            yield Finding("plugin", text, True)


def _seams() -> Iterator[Finding]:
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    algorithm = SpeculativeAlgorithm.from_string(ALGORITHM)
    steps = sorted(step for step, hooks in _HOOKS.items() if any(_is_ours(hook) for hook in hooks))
    if not steps:
        yield Finding("algorithm", f"{ALGORITHM} is registered, but hangs in no step of the resolution", False)
    elif not algorithm.is_dspark():
        yield Finding("algorithm", f"{ALGORITHM} is registered, but not as a DSpark algorithm", False)
    else:
        yield Finding("algorithm", f"{ALGORITHM} is registered; resolution steps: {', '.join(steps)}", True)


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("sglang_adaptive.")


def _others() -> Iterator[Finding]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_adaptive.guard.symbols import registers

    ours = {patch.target for register in registers().values() for patch in register}
    foreign = {
        target: sorted({source.plugin_name if source else "unknown" for _, hook, source in hooks if not _is_ours(hook)})
        for target, hooks in HookRegistry._hooks.items()
    }
    for target, plugins in sorted(foreign.items()):
        if plugins and target in ours:
            yield Finding(
                "other plugins", f"{', '.join(plugins)} hooks {target}, which must stay the host's: uninstall it", False
            )
        elif plugins:
            yield Finding("other plugins", f"{', '.join(plugins)} hooks {target}, which is no concern of ours")


def _platform() -> Iterator[Finding]:
    from sglang.srt.platforms import current_platform

    kind = type(current_platform)
    where = "ours, for a machine without an accelerator" if _is_ours(kind) else "the host's"
    yield Finding("platform", f"{kind.__name__} ({where}), device {current_platform.device_type}", True)


def _attention() -> Iterator[Finding]:
    """Asks the host's own rule for its default, for an ordinary model of either kind."""
    try:
        triton_ragged = Options.from_env().triton_ragged
    except AdaptiveError:
        # The finding on the options says why.
        return
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend
    from sglang.srt.server_args import ServerArgs

    record = ServerArgs(model_path="dummy", speculative_algorithm="DSPARK")
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[]),
        has_attention_sinks=False,
        has_asymmetric_kv=False,
        get_num_kv_heads=lambda tensor_parallel_size: 8,
    )
    for mla, models in ((False, "multi-head and grouped-query models"), (True, "latent-attention models")):
        backend = get_default_attn_backend(record, mla, model)
        if mla and backend == ATTENTION_BACKEND:
            yield Finding("attention", f"{models} are not served by the CPU platform")
        else:
            effect = backends.EFFECT[backends.capability(backend, mla, triton_ragged)]
            yield Finding("attention", f"with the default backend {backend}, {models}: {effect}")


def verdict(findings: Sequence[Finding]) -> str:
    """One sentence: what DSPARK_ADAPTIVE would do here."""
    failed = [finding for finding in findings if finding.ok is False]
    if failed:
        return f"{ALGORITHM} would not run here: see {', '.join(dict.fromkeys(finding.name for finding in failed))}."
    usual = next(finding.text for finding in findings if finding.name == "attention")
    return f"{ALGORITHM} would run here; {usual}."


def main(argv: Sequence[str]) -> int:
    """Print the report; 0 when DSPARK_ADAPTIVE would run here, else 1."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    as_json = parser.parse_args(argv).json
    quiet = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # The host and other plugins print while they are imported.
        with contextlib.redirect_stdout(sys.stderr):
            findings = diagnose()
    finally:
        logging.disable(quiet)
    ok = all(finding.ok is not False for finding in findings)
    if as_json:
        report = {"ok": ok, "verdict": verdict(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=1))
    else:
        for finding in findings:
            mark = {True: "ok", False: "FAIL", None: "-"}[finding.ok]
            print(f"{mark:>4}  {finding.name:<16} {finding.text}")
        print(f"\n{verdict(findings)}")
    return 0 if ok else 1
