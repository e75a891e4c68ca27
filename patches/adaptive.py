"""What DSPARK_ADAPTIVE changes in the host, on every platform."""

from __future__ import annotations

from typing import Any

from sglang_adaptive import ALGORITHM, activation
from sglang_adaptive.patches.registry import Patch


def _worker(create: Any, algorithm: Any, server_args: Any) -> type:
    if activation.is_adaptive(server_args):
        return activation.worker_class(server_args)
    return create(algorithm, server_args)


def _name(resolved: dict[str, Any], server_args: Any) -> dict[str, Any]:
    if activation.is_adaptive(server_args):
        resolved["speculative_algorithm"] = ALGORITHM
    return resolved


def _state(result: None, controller: Any, state: dict[str, Any]) -> None:
    report = getattr(controller.scheduler.draft_worker, "adaptive_state", None)
    if report is not None:
        state["sglang_adaptive"] = report()


PATCHES = [
    Patch(
        target="sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        hook=_worker,
        kind="around",
        why="The host resolves the drafter's family; its worker class is chosen here, where only an out-of-tree "
        "platform could replace it.",
        remove_when="the host looks the worker up by the raw name, or asks the platform on CUDA too",
    ),
    Patch(
        target="sglang.srt.server_args.ServerArgs.resolved_dict",
        hook=_name,
        kind="after",
        why="/server_info and Engine.get_server_info report the resolved value, which is the family.",
        remove_when="a registered algorithm can declare its family beside its name",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        hook=_state,
        kind="after",
        why="/server_info has no place for what a draft worker wants to report.",
        remove_when="draft workers can contribute to the internal state",
    ),
]
