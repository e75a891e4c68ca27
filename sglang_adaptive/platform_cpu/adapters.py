"""LoRA adapters that the CPU platform cannot apply, refused before any weight is loaded.

Adapters that are on the hub, or are loaded while the server runs, are looked at when they load (``lora.py``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sglang_adaptive.errors import AdaptiveError

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook of a step in which the model is known. Raises AdaptiveError."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    cfg = resolving_view(server_args)
    if cfg.enable_lora or (cfg.lora_paths and cfg.enable_lora is not False):
        refuse(model_config_of(server_args).hf_text_config, cfg.lora_target_modules, cfg.lora_paths or ())
    previous(server_args)


def refuse(target: Any, flag: Iterable[str] | None, paths: Any) -> None:
    """Raise AdaptiveError where ``--lora-target-modules`` or an adapter's folder names what cannot be adapted.

    ``target`` is the model's text configuration, ``paths`` are ``--lora-paths`` as given or as parsed by the host.
    """
    experts = any(getattr(target, name, None) for name in _EXPERT_COUNTS)
    named: dict[str, Any] = {"--lora-target-modules": flag or ()}
    for folder in _folders(paths):
        with contextlib.suppress(OSError, ValueError):
            named[str(folder)] = json.loads((folder / "adapter_config.json").read_text()).get("target_modules") or ()
    for where, modules in named.items():
        names = {modules} if isinstance(modules, str) else {name.rsplit(".", 1)[-1] for name in modules}
        if "lm_head" in names:
            raise AdaptiveError(
                f"The CPU platform does not apply LoRA adapters to the output head, which {where} names: leave lm_head "
                "out."
            )
        both = "down_proj" in names and names & {"gate_proj", "up_proj", "gate_up_proj"}
        if experts and (both or names & {"all", "all-linear"}):
            raise AdaptiveError(
                f"The CPU platform does not apply LoRA adapters to the experts of a mixture, which {where} names: "
                "leave gate_proj, up_proj and down_proj out."
            )


def _folders(paths: Any) -> list[Path]:
    """Of ``--lora-paths`` as the user gave them (``name=path``, a path, a record), or as the host has parsed them."""
    found = []
    for entry in paths.values() if isinstance(paths, dict) else paths:
        if isinstance(entry, dict):
            path = entry.get("lora_path", "")
        elif isinstance(entry, str) and not isinstance(paths, dict):
            path = entry.split("=", 1)[-1]
        else:
            path = getattr(entry, "lora_path", entry)
        found.append(Path(str(path)))
    return found
