"""The cost tables that come with the simulator, and ways to be wrong about them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.policy.cost import CostModel, CostTableError

FOLDER = Path(__file__).parents[1] / "tables"
_MAX_BYTES = 8 << 20

# What the policy is told about the costs: factors on the verify times at the smallest and at the largest tier, and on
# the drafter's.
ERRORS = {
    "exact": (1.0, 1.0, 1.0),
    "costs-30": (0.7, 0.7, 0.7),
    "costs+30": (1.3, 1.3, 1.3),
    "flatter": (1.3, 0.7, 1.0),
    "steeper": (0.7, 1.3, 1.0),
    "draft-30": (1.0, 1.0, 0.7),
    "draft+30": (1.0, 1.0, 1.3),
}


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_table(name: str) -> tuple[CostModel, dict[str, str]]:
    """A table by name or by path, and its key, which says where it comes from. Raises AdaptiveError."""
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    try:
        with path.open("rb") as file:
            key = dict(json.loads(file.read(_MAX_BYTES))["key"])
        return CostModel.load(path, key), key
    except FileNotFoundError as error:
        raise AdaptiveError(f"There is no cost table {name!r}; give a file or one of {', '.join(names())}.") from error
    except (OSError, CostTableError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise AdaptiveError(f"{path} is no usable cost table ({error}).") from error


def misjudged(table: CostModel, error: str) -> CostModel:
    """The table as a policy sees it that is wrong by one of ``ERRORS``: the factor runs evenly over log tokens, and
    what comes out is made monotone as every table is."""
    low, high, draft = ERRORS[error]
    place = np.log(table.tiers / table.tiers[0]) / max(np.log(table.tiers[-1] / table.tiers[0]), 1e-9)
    factor = np.exp(np.log(low) + place * (np.log(high) - np.log(low)))
    wrong = np.maximum.accumulate(table.verify_ms * factor[:, None], axis=0)
    narrow = {width: draft * ms for width, ms in table.narrow_draft_ms.items()}
    return replace(
        table,
        verify_ms=np.maximum.accumulate(wrong, axis=1),
        draft_ms=draft * table.draft_ms,
        narrow_draft_ms=narrow,
    )
