"""A trace of every decode step: what was known, decided, verified, accepted and measured.

Format, version 2, little-endian, made of blocks. A file begins with the 8 bytes ``SGADTRC2``. A block is a 20-byte head
(``<4sIIII``: tag, steps in it, bytes of its payload, CRC-32 of the payload, steps lost before it) and its payload.

``HEAD``, the first block, is JSON: ``gamma`` (K), ``reasons`` (the decision's reason, by number) and ``meta`` (text by
name). Every other block is ``STEP``; its payload is zlib-compressed and holds one after the other:

* ``STEP_TYPE`` per step. ``requests`` is R; ``tier`` the graph size in tokens (0: unknown); ``flags`` are ``DRAFTED``
  (with confidences), ``UNIFORM``, ``DECIDED`` (a decision was known), ``FEATURED`` and ``COUNTED`` (it drafted, as the
  decision that it repeats says, and has neither confidences nor a time); times are ms and NaN where there are none.
* ``ROW_TYPE`` per request of every step, in the order of the batch: drafts verified, of those accepted, and the
  temperature of the draft (0: greedy; NaN without features).
* float16 [K] per request of every drafted step: log-odds of its raw confidences, limited to +-12 (so 0 and 1 become
  6e-6 and 1 - 6e-6); NaN where a confidence is no probability.
* float16 [K, 3] per request of every featured step, of the distributions that the drafts come from: log-odds of the
  maximum, entropy (nats), and margin (log of the likeliest token's probability over the second's, at most 24).

A killed server leaves at most one incomplete block, at the end; readers stop there.
"""

from __future__ import annotations

import struct

import numpy as np

from sglang_adaptive.policy import budget, draft_width, explore, mode_choice, saturation, steady

MAGIC = b"SGADTRC2"
BLOCK = struct.Struct("<4sIIII")
HEAD, STEP = b"HEAD", b"STEP"
DRAFTED, UNIFORM, DECIDED, FEATURED, COUNTED = 1, 2, 4, 8, 16
STEP_TYPE = np.dtype(
    [
        ("iteration", "<i8"),
        ("requests", "<u4"),
        ("budget", "<u4"),
        ("tier", "<u4"),
        ("kv_tokens", "<f8"),
        ("step_ms", "<f4"),
        ("predicted_ms", "<f4"),
        ("expected_tokens", "<f4"),
        ("gain", "<f4"),
        ("flags", "u1"),
        ("reason", "u1"),
    ]
)
ROW_TYPE = np.dtype(
    [("slot", "<u4"), ("generation", "<i8"), ("verified", "u1"), ("accepted", "u1"), ("temperature", "<f2")]
)
FEATURES = 3
MARGIN_LIMIT = 24.0
REASONS = (
    "other",
    budget.NO_TABLE,
    budget.NOTHING_TO_SIZE,
    budget.SMALL_GAIN,
    budget.ALL_WORTH,
    budget.LOW_LOAD,
    budget.TRIMMED,
    explore.EXPLORE,
    saturation.SATURATED,
    saturation.PROBE,
    explore.EXPLORE_TIER,
    mode_choice.LOOK,
    mode_choice.LOOK_WHOLE,
    mode_choice.LOOK_TRIMMED,
    steady.WHOLE_IS_FASTER,
    draft_width.MEASURE,
)

MAX_BLOCK_BYTES = 64 << 20
MAX_GAMMA = 255
