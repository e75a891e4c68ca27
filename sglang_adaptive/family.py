"""Which family of drafts a server's checkpoints belong to, found by itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sglang_adaptive import ALGORITHM
from sglang_adaptive.errors import AdaptiveError


@dataclass(frozen=True)
class Family:
    """A family of drafts.

    Attributes:
        name: what users call it.
        algorithm: what the host is told; its own alias for NEXTN is EAGLE.
        steps: K where the user says nothing; None where the draft's block says it.
    """

    name: str
    algorithm: str
    steps: int | None = None


DSPARK = Family("DSPARK", "DSPARK")
# Each draft token is a step of its own, so K costs time even where the tokens are trimmed. The host's own defaults are
# 5 for EAGLE and 3 for MTP, whose single layer was trained to look one token ahead.
EAGLE3 = Family("EAGLE3", "EAGLE3", 5)
EAGLE = Family("EAGLE", "EAGLE", 5)
NEXTN = Family("NEXTN", "EAGLE", 3)
FAMILIES = {family.name: family for family in (DSPARK, EAGLE3, EAGLE, NEXTN)}

# Where a checkpoint says that it carries layers for multi-token prediction.
_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Checkpoints of these carry one and do not say so.
_MTP_TARGETS = ("Qwen3NextForCausalLM",)


def find(server_args: Any) -> Family:
    """The family of the raw arguments' draft; DSPARK where it cannot be read, which the later checks then say.

    Called before anything is resolved: nothing but the configurations is read.
    """
    path = separate_draft(server_args)
    if path is not None:
        return of_draft(_config(path, server_args.speculative_draft_model_revision, server_args))
    target = _config(server_args.model_path, server_args.revision, server_args)
    if target is None or _carries_dspark(server_args.model_path, target):
        return DSPARK
    return NEXTN if carries_mtp(target) else DSPARK


def separate_draft(server_args: Any) -> str | None:
    """Path of a draft that is not the target's own checkpoint."""
    path = server_args.speculative_draft_model_path
    return None if path in (None, server_args.model_path) else str(path)


def of_draft(config: Any) -> Family:
    """The family of a draft checkpoint by its configuration."""
    names = " ".join(str(name).lower() for name in getattr(config, "architectures", None) or [])
    if "eagle3" in names:
        return EAGLE3
    if "eagle" in names:
        return EAGLE
    if "nextn" in names or "mtp" in names:
        return NEXTN
    return DSPARK


def carries_mtp(config: Any) -> bool:
    """Whether a target's checkpoint carries layers for multi-token prediction."""
    for section in (config, getattr(config, "text_config", None)):
        for field in _MTP_FIELDS:
            value = getattr(section, field, None)
            if isinstance(value, int) and value > 0:
                return True
    return any(name in _MTP_TARGETS for name in getattr(config, "architectures", None) or [])


def chain(server_args: Any, family: Family) -> dict[str, int]:
    """The shape of the draft chain to declare: what the user gave, or the family's. Raises AdaptiveError for a tree."""
    topk, steps = server_args.speculative_eagle_topk, server_args.speculative_num_steps
    tokens = server_args.speculative_num_draft_tokens
    if topk not in (None, 1):
        raise AdaptiveError(
            f"{ALGORITHM} verifies chains of drafts, and --speculative-eagle-topk {topk} drafts trees: drop it."
        )
    if steps is None:
        steps = family.steps if tokens is None else tokens - 1
    if steps < 1:
        raise AdaptiveError(f"{ALGORITHM} needs at least one draft: --speculative-num-steps N with N from 1.")
    if tokens not in (None, steps + 1):
        raise AdaptiveError(
            f"A chain of {steps} steps has {steps + 1} tokens to verify, not --speculative-num-draft-tokens {tokens}: "
            "drop one of the two."
        )
    return {"speculative_eagle_topk": 1, "speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}


def _config(path: str, revision: str | None, server_args: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        return get_config(path, trust_remote_code=server_args.trust_remote_code, revision=revision)
    except Exception:
        return None


def _carries_dspark(path: str, config: Any) -> bool:
    from sglang.srt.speculative.dspark_components.dspark_config import checkpoint_bundles_dspark_draft

    return checkpoint_bundles_dspark_draft(config) or os.path.isfile(os.path.join(path, "dspark", "config.json"))
