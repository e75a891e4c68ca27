"""From ``--speculative-algorithm DSPARK_ADAPTIVE`` to an active plugin in every process of the server.

The host asks in some eighty places which algorithm runs, in a quarter of them by comparing the name. The first step of
the resolution therefore declares the drafter's family (DSPARK, EAGLE3 or EAGLE, by the checkpoint) as the resolved
value, which all of them read, while the raw record keeps the name that the user gave: that is the adaptive identity.

A child process gets the record by pickling. The marker that ``resolve_family`` hangs onto it activates the plugin when
it is unpickled, before the child runs its first statement; a child that cannot import the plugin fails there, so none
can run as stock without anyone noticing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_adaptive import ALGORITHM, family
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.family import Family

logger = logging.getLogger(__name__)

RAGGED_MODE = "SGLANG_RAGGED_VERIFY_MODE"

_mode_is_ours = False
_family = family.DSPARK


class Marker:
    """Rides on the server's argument record, and activates the plugin in the process that unpickles it.

    ``mode`` is the host's ragged verification mode: ``compact``, or ``static`` on an attention backend that can only
    verify uniformly. ``family`` is the name of the draft's family.
    """

    def __init__(self, mode: str, family: str) -> None:
        self.mode, self.family = mode, family

    def __reduce__(self) -> tuple[Callable[[str, str], Marker], tuple[str, str]]:
        return arrive, (self.mode, self.family)


def arrive(mode: str, name: str) -> Marker:
    """Activate this process. Called by pickle in each child process."""
    _set_mode(mode)
    activate(family.FAMILIES[name])
    return Marker(mode, name)


def active_family() -> Family:
    """The family that this process serves; DSPARK before it is known."""
    return _family


def is_adaptive(server_args: Any) -> bool:
    """Whether the raw record asks for the adaptive algorithm, in any case."""
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


def activate(found: Family) -> None:
    """Check the host and the options, and apply the patches that every process needs. Idempotent."""
    global _family
    from sglang_adaptive.guard import require
    from sglang_adaptive.options import Options
    from sglang_adaptive.patches import adaptive, decode_lengths, metrics, registry, request_row

    require()
    Options.from_env(os.environ)
    registry.apply([*adaptive.PATCHES, *metrics.PATCHES, *request_row.PATCHES, *decode_lengths.PATCHES])
    _family = found


def _set_mode(mode: str) -> None:
    """The host reads its mode from the environment, in the launcher and in every child."""
    global _mode_is_ours
    os.environ[RAGGED_MODE] = mode
    _mode_is_ours = True


def _unset_mode() -> None:
    """An Engine with another algorithm may follow ours in one process: leave its environment as it was."""
    global _mode_is_ours
    if _mode_is_ours:
        os.environ.pop(RAGGED_MODE, None)
        _mode_is_ours = False


def resolve_family(server_args: Any, previous: Callable[[Any], None]) -> None:
    """First step of the resolution: activate, and declare the family of the drafter."""
    _unset_mode()
    if is_adaptive(server_args):
        from sglang.srt.arg_groups.overrides import declare_resolution

        if RAGGED_MODE in os.environ:
            raise AdaptiveError(f"{RAGGED_MODE} is set, but {ALGORITHM} chooses the mode itself: unset it.")
        found = family.find(server_args)
        shape = {} if found.steps is None else family.chain(server_args, found)
        activate(found)
        # Also what the host captures graphs by, whatever the family.
        _set_mode("compact")
        server_args._sglang_adaptive = Marker("compact", found.name)
        declare_resolution(server_args, "sglang_adaptive", speculative_algorithm=found.algorithm, **shape)
    previous(server_args)


def check_after_resolution(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around the host's resolution of the speculative arguments: refuse what cannot work, before weights load."""
    if is_adaptive(server_args):
        from sglang_adaptive import checks

        checks.before(server_args, _family)
        _fall_back_to_uniform(server_args)
        previous(server_args)
        checks.after(server_args)
    else:
        previous(server_args)


def _fall_back_to_uniform(server_args: Any) -> None:
    """Where the target cannot verify ragged lengths, verify every draft token, and log why."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolving_view
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor.cuda_graph_config import Backend

    from sglang_adaptive.guard import backends
    from sglang_adaptive.options import Options

    cfg = resolving_view(server_args)
    model = model_config_of(server_args)
    graphs = cfg.device != "cpu" and cfg.cuda_graph_config.decode.backend != Backend.DISABLED
    mla, triton_ragged = model.attention_arch == AttentionArch.MLA, Options.from_env(os.environ).triton_ragged
    enough = (backends.GRAPHS,) if graphs else (backends.GRAPHS, backends.EAGER)
    reason = backends.unable_target(model) or backends.unable_adapters(cfg)
    for name in attention_backends_of(cfg):
        able = backends.capability(name, mla, triton_ragged)
        if able == backends.NONE:
            raise AdaptiveError(
                f"The attention backend {name} cannot verify draft tokens, so {ALGORITHM} cannot serve with it: drop "
                "--attention-backend to get the default of this machine."
            )
        if able not in enough:
            under = " under CUDA graphs" if graphs else ""
            reason = f"attention backend {name} cannot verify a different number per request{under}"
        elif name == "triton":
            reason = reason or backends.unable_triton(cfg, model)
    if reason is not None:
        logger.warning("%s verifies every draft token: %s.", ALGORITHM, reason)
        _set_mode("static")
        server_args._sglang_adaptive = Marker("static", _family.name)


def worker_class(server_args: Any) -> type:
    """The worker of the family, and what it needs in the host (imports the runtime)."""
    from sglang.srt.arg_groups.model_override_base import resolved_view

    from sglang_adaptive.options import Options
    from sglang_adaptive.patches import (
        eagle,
        eagle_sampling,
        min_p,
        packed_rows,
        registry,
        sampling,
        seeds,
        triton_ragged,
    )

    view, packs = resolved_view(server_args), os.environ.get(RAGGED_MODE) == "compact"
    registry.apply([*min_p.PATCHES, *(seeds.PATCHES if view.enable_deterministic_inference else ())])
    if packs and view.device == "cuda":
        registry.apply(packed_rows.PATCHES)
    if packs and Options.from_env(os.environ).triton_ragged:
        registry.apply(triton_ragged.PATCHES)
    if _family is not family.DSPARK:
        from sglang_adaptive.runtime.eagle import AdaptiveEagleWorker

        registry.apply([*eagle.PATCHES, *eagle_sampling.PATCHES])
        return AdaptiveEagleWorker
    from sglang_adaptive.runtime.worker import AdaptiveDSparkWorker

    registry.apply(sampling.PATCHES)
    return AdaptiveDSparkWorker


def family_class() -> type:
    """The registered algorithm's class: every question is answered as the draft's family answers it."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    def delegate(name: str) -> Callable[..., Any]:
        def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(SpeculativeAlgorithm[_family.algorithm], name)(*args, **kwargs)

        ask.__name__ = name
        return ask

    own = {"create_worker"}
    questions = {
        name: delegate(name)
        for name, value in vars(SpeculativeAlgorithm).items()
        if callable(value) and not name.startswith("_") and name not in own
    }
    return type("AdaptiveAlgorithm", (CustomSpecAlgo,), questions)
