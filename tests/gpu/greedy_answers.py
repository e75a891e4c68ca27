"""Greedy answers of a server, and whether two servers' are as much alike as kernels allow."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from server import Server

from sglang_adaptive.benchmarks.equality import Agreement, greedy

# What kernels change by themselves between batch sizes varies from run to run: so much more may differ.
SLACK = 0.1
DRIFT = Path(__file__).parents[1] / "e2e" / "drift"


def drafting(cache: Path, **variables: str) -> dict[str, str]:
    """Environment of a server of ours that always drafts, whose costs the ``variables`` make up (e2e/drift)."""
    return {
        "SGLANG_ADAPTIVE_CACHE_DIR": str(cache),
        "SGLANG_ADAPTIVE_SKIP_DRAFT": "off",
        "SGLANG_ADAPTIVE_TRITON_RAGGED": "on",
        "PYTHONPATH": os.pathsep.join([str(DRIFT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **variables,
    }


def ask(server: Server, prompts: Sequence[str], tokens: int, at_a_time: int) -> list[list[int]]:
    """The token ids that follow each prompt at temperature 0, so many requests at a time."""
    fields = [{"text": prompt} for prompt in prompts]
    return asyncio.run(greedy(server.client.url, fields, tokens, at_a_time))


def assert_no_worse(found: Agreement, control: Agreement, tokens: int) -> None:
    """``found`` of ours with the reference; ``control`` of the reference with itself at another batch size."""
    assert found.equal >= control.equal - SLACK * control.prompts, (found, control)
    assert found.prefix >= control.prefix - SLACK * tokens, (found, control)
