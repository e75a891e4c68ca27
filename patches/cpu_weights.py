"""CPU platform, weight updates: a packed copy of a weight has to follow the weight."""

from typing import Any

from sglang_adaptive.patches.registry import Patch
from sglang_adaptive.platform_cpu import linear

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def _note(result: Any, *args: Any, **kwargs: Any) -> None:
    linear.weights_changed()


PATCHES = [
    Patch(
        target=f"{_MANAGER}.{method}",
        why="The host writes weights through Tensor.data, unobservably, so the packed copies would go stale.",
        remove_when="the host calls the platform after a weight update, as it does after loading a model.",
        hook=_note,
        kind="after",
    )
    for method in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "end_weight_update",
    )
]
