"""Acceptance for targets with dummy weights: drawn from stated per-position rates, the same for every arm.

A target with random weights costs what the real one costs, but accepts nothing. So a benchmark may say how drafts fare
instead: a file gives the rate at which the draft at each position of a block is accepted, given that those before it
were, and how good the confidences are. The fate of the draft for position t of a request is a property of the request
and of t alone, drawn from a counter-based generator: whichever way an arm reaches t, the same draft passes or fails
there and the same confidence is heard of it.

The chance that a draft passes is Beta distributed around its rate; the head hears that chance through a shift of its
log-odds. The width of the distribution gives the AUC, the shift the ECE (Naeini et al. 2015, with bins of one value).
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import betaincinv, expit, logit

from sglang_adaptive.errors import AdaptiveError

VARIABLE = "ADAPTIVE_BENCH_ACCEPTANCE"
BINS = 1024
POSITIONS = 2048
_WIDEST, _NARROWEST = 0.02, 2000.0


@dataclass(frozen=True)
class Kind:
    """Requests of one kind.

    ``share`` of all requests; ``rates`` of acceptance by position in the block, each given that the drafts before it
    were accepted; ``auc`` and ``ece`` of the confidences at every position, ``ece`` > 0 for too confident ones.
    """

    name: str
    share: float
    rates: tuple[float, ...]
    auc: float
    ece: float

    def lengths(self, gamma: int) -> float:
        """Expected tokens per step with ``gamma`` verified drafts, the anchor included."""
        return 1.0 + float(np.cumprod(self.rates[:gamma]).sum())


@dataclass(frozen=True)
class Acceptance:
    """What a file says: ``source`` names where the rates and the quality of the confidences come from."""

    name: str
    source: str
    seed: int
    kinds: tuple[Kind, ...]
    digest: str

    def describe(self, gamma: int) -> dict[str, Any]:
        """What a server and a result file show of it."""
        return {
            "simulated": True,
            "name": self.name,
            "source": self.source,
            "digest": self.digest,
            "expected_accept_length": sum(kind.share * kind.lengths(gamma) for kind in self.kinds),
            "kinds": [
                {"name": k.name, "share": k.share, "rates": list(k.rates[:gamma]), "auc": k.auc, "ece": k.ece}
                for k in self.kinds
            ],
        }


def read(path: Path) -> Acceptance:
    """The acceptance that ``path`` (TOML) describes.

    ``rates`` are conditional; a file may give ``survival`` instead, the published form: how often the draft at each
    position is accepted, whatever became of those before it. Raises AdaptiveError for a file that makes no sense.
    """
    try:
        raw = path.read_bytes()
        data = tomllib.loads(raw.decode())
        kinds = tuple(_kind(item) for item in data["kinds"])
        total = sum(kind.share for kind in kinds)
        kinds = tuple(Kind(k.name, k.share / total, k.rates, k.auc, k.ece) for k in kinds)
        digest = hashlib.sha256(raw).hexdigest()[:12]
        return Acceptance(data["name"], data["source"], int(data.get("seed", 0)), kinds, digest)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise AdaptiveError(f"{path} describes no acceptance ({reason}): see benchmarks/acceptance_files.") from None


def _kind(item: dict[str, Any]) -> Kind:
    if ("rates" in item) == ("survival" in item):
        raise ValueError("a kind needs either rates or survival")
    if "rates" in item:
        rates = np.asarray(item["rates"], np.float64)
    else:
        survival = np.asarray(item["survival"], np.float64)
        rates = survival / np.concatenate([[1.0], survival[:-1]])
    kind = Kind(item["name"], float(item["share"]), tuple(rates.tolist()), float(item["auc"]), float(item["ece"]))
    if not rates.size or not ((rates > 0) & (rates < 1)).all():
        raise ValueError(f"rates of {kind.name} must lie between 0 and 1, given the drafts before")
    if not (kind.share > 0 and 0.5 < kind.auc < 0.99 and abs(kind.ece) < 0.4):
        raise ValueError(f"{kind.name} needs share > 0, 0.5 < auc < 0.99 and |ece| < 0.4")
    return kind


@lru_cache(maxsize=1024)
def chances(rate: float, auc: float, ece: float) -> tuple[np.ndarray, np.ndarray]:
    """[BINS] float32 quantiles of the true chance of acceptance, and what the head says at each.

    Their mean is ``rate``, the head's AUC and mean absolute error are as given (the error as far as the rate allows).
    """
    width = _solve(lambda log: _auc(_quantiles(rate, np.exp(log))) - auc, np.log(_NARROWEST), np.log(_WIDEST))
    truth = _quantiles(rate, float(np.exp(width)))
    odds = logit(np.clip(truth, 1e-6, 1 - 1e-6))
    shift = _solve(lambda by: float(np.abs(expit(odds + by) - truth).mean()) - abs(ece), 0.0, 12.0)
    heard = expit(odds + np.copysign(shift, ece)) if ece else truth
    return truth.astype(np.float32), heard.astype(np.float32)


def _quantiles(rate: float, concentration: float) -> np.ndarray:
    at = (np.arange(BINS) + 0.5) / BINS
    values = betaincinv(rate * concentration, (1 - rate) * concentration, at)
    for _ in range(6):  # the midpoints' mean is a little off where the density is steep
        values = np.clip(values * rate / values.mean(), 0.0, 1.0)
    return values


def _auc(chance: np.ndarray) -> float:
    """AUC of equally likely chances, sorted, as scores of their own outcomes."""
    passed, failed = chance / chance.sum(), (1 - chance) / (1 - chance).sum()
    below = np.cumsum(failed) - failed
    return float((passed * (below + 0.5 * failed)).sum())


def _solve(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where ``rising``, which grows from ``low`` to ``high`` (in either order), is zero; the nearer end otherwise."""
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def request_key(prompt: Sequence[int]) -> int:
    """64 bits of a request: those of its prompt, so that it is the same request on every server."""
    return int.from_bytes(hashlib.blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=8).digest(), "little")


def draws(seed: int, key: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Of one request: a number in [0, 1) for its kind, and per position a float32 in [0, 1) and an int16 bin."""
    generator = np.random.Generator(np.random.Philox(key=[seed, key]))
    numbers = generator.random(2 * POSITIONS + 1)
    bins = (numbers[1 + POSITIONS :] * BINS).astype(np.int16)
    return float(numbers[0]), numbers[1 : 1 + POSITIONS].astype(np.float32), bins


class Fates:
    """The fates of all running requests, on the device: written when a request is admitted, read once per step.

    Args:
        gamma: K, drafts per request and step. Raises AdaptiveError where the file has rates for fewer.
        slots: request slots of the server.
        device: where the steps run.

    Positions count modulo ``POSITIONS``.
    """

    def __init__(self, acceptance: Acceptance, gamma: int, slots: int, device: Any) -> None:
        shortest = min(len(kind.rates) for kind in acceptance.kinds)
        if shortest < gamma:
            raise AdaptiveError(f"{acceptance.name} has rates for {shortest} positions, but the draft has {gamma}.")
        self.acceptance, self.gamma, self.device = acceptance, gamma, torch.device(device)
        pairs = [[chances(rate, k.auc, k.ece) for rate in k.rates[:gamma]] for k in acceptance.kinds]
        self._truth, self._heard = (
            torch.from_numpy(np.stack([[pair[which] for pair in kind] for kind in pairs])).to(self.device)
            for which in (0, 1)
        )
        self._edges = np.cumsum([kind.share for kind in acceptance.kinds])[:-1]
        self._ahead = ((torch.arange(POSITIONS)[:, None] + torch.arange(1, gamma + 1)) % POSITIONS).to(self.device)
        self._depth = torch.arange(gamma, device=self.device)
        self._run = torch.zeros((slots, POSITIONS), dtype=torch.int64, device=self.device)
        self._confidence = torch.full((slots, POSITIONS, gamma), 0.5, device=self.device)
        self._keys: dict[int, int] = {}

    def admit(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """Draw the fates of the requests that hold these slots from now on; those known already cost nothing."""
        new = [(slot, key) for slot, key in zip(slots, keys, strict=True) if self._keys.get(slot) != key]
        if not new:
            return
        self._keys.update(new)
        drawn = [draws(self.acceptance.seed, key) for _, key in new]
        kinds = np.searchsorted(self._edges, [kind for kind, _, _ in drawn], side="right")
        rows, kind, luck, bins = (
            self._to_device(torch.from_numpy(np.ascontiguousarray(values)))
            for values in (
                np.array([slot for slot, _ in new]),
                kinds,
                np.stack([luck for _, luck, _ in drawn]),
                np.stack([bins for _, _, bins in drawn]),
            )
        )
        at = bins.long()[:, self._ahead]
        kind = kind[:, None, None]
        passed = luck[:, self._ahead] < self._truth[kind, self._depth, at]
        self._run[rows] = passed.long().cumprod(-1).sum(-1)
        self._confidence[rows] = self._heard[kind, self._depth, at]

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def look(self, slots: torch.Tensor, prefix_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] int64 drafts that would pass if all were verified, and [R, K] float32 confidences, at these positions."""
        at = prefix_lens % POSITIONS
        return self._run[slots, at], self._confidence[slots, at]
