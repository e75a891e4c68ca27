"""What a user may set on the decision engine. Nobody needs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sglang_adaptive.policy.saturation import SkipRules


@dataclass(frozen=True)
class PolicyConfig:
    """Defaults are meant to stay.

    ``objective``: "ratio" maximises tokens per ms of the step itself; "rate" maximises tokens minus the measured
    long-run rate times ms, and behaves as "ratio" until the rate is known.
    ``min_gain``: a trim must promise this relative gain over verifying everything.
    ``trim_ms``: fixed price in ms of a step that is not uniform (allocation kernels, packing).
    ``min_len``, ``max_len``: bounds on a request's verify length, 1 + drafts; ``max_len`` None is K + 1.
    ``trust_new``: requests without history count as sure; False takes them as typical of the recent batches, and at
    first as accepting three drafts of four.
    ``calibrate``: learn a map from the head's confidences to acceptance rates.
    ``learns_first``: somebody else corrects the confidences; as with ``calibrate``, drafting goes on until that was
    given time.
    ``correct_costs``: correct the profiled cost table from measured step times.
    ``skip_draft``: allow steps without a drafter when drafting costs more than it gains (rules in ``skip``).
    ``explore_steps``: after so many steps on end without one that verified everything, the next that drafts does, so
    that deep positions and large tiers are still learned about; 0 never does.
    ``look_steps``: a server that drafts takes a few steps without a draft after at most so many, to learn what they
    take; 0 never does.
    ``forget_steps``: a tier's cost correction that was not confirmed for so many steps is dropped.
    ``refresh_steps``: measured state (rates, cost correction) comes into force once per so many observed steps.
    ``narrow_whole``: a step that verifies all of a shorter draft needs no packing, as one that verifies all K drafts.
    ``auto_refresh``: False where a worker passes the state of rank 0 around instead.
    """

    objective: Literal["ratio", "rate"] = "ratio"
    min_gain: float = 0.01
    trim_ms: float = 0.0
    min_len: int = 1
    max_len: int | None = None
    trust_new: bool = False
    calibrate: bool = True
    learns_first: bool = False
    correct_costs: bool = True
    skip_draft: bool = True
    skip: SkipRules = field(default_factory=SkipRules)
    explore_steps: int = 512
    look_steps: int = 4096
    forget_steps: int = 4096
    refresh_steps: int = 64
    narrow_whole: bool = True
    auto_refresh: bool = True

    def __post_init__(self) -> None:
        if self.objective not in ("ratio", "rate"):
            raise ValueError(f"objective is {self.objective!r}, allowed are 'ratio' and 'rate'")
        if not 0 <= self.min_gain <= 1:
            raise ValueError(f"min_gain is {self.min_gain}, allowed are 0 to 1")
        if not 0 <= self.trim_ms < 1e3:
            raise ValueError(f"trim_ms is {self.trim_ms}, allowed are 0 up to but not including 1000 ms")
        if self.min_len < 1:
            raise ValueError(f"min_len is {self.min_len}, allowed are 1 and more")
        if self.max_len is not None and self.max_len < self.min_len:
            raise ValueError(f"max_len is {self.max_len}, allowed are min_len ({self.min_len}) and more")
        for name in ("explore_steps", "look_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 0 and more")
        for name in ("refresh_steps", "forget_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 1 and more")
