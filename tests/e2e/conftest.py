"""Servers that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import costs
import pytest
import tiny_adapter
import tiny_language as language
from server import Server, speculative

PROMPTS = language.random_prompts(24, seed=11)
TOKENS = 64


@pytest.fixture(scope="session")
def adaptive_server(
    tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, log_dir: Path
) -> Iterator[Server]:
    """The tiny pair under DSPARK_ADAPTIVE with overlap scheduling, trimming."""
    target, draft = tiny_pair
    environment = costs.environment(tmp_path_factory.mktemp("cache"))
    with Server(target, *speculative(draft), "--sleep-on-idle", log_dir=log_dir, environment=environment) as server:
        yield server


@pytest.fixture(scope="session")
def dear_costs(adaptive_server: Server) -> Path:
    """The cache folder of the server above: its cost table makes verified tokens dear, so that the policy trims."""
    return Path(adaptive_server._environment["SGLANG_ADAPTIVE_CACHE_DIR"])


@pytest.fixture(scope="session")
def expected_ids(tiny_plain_server: Server) -> list[list[int]]:
    """Greedy continuations of PROMPTS without speculation."""
    return tiny_plain_server.greedy_ids(PROMPTS, TOKENS)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two LoRA adapters of the tiny target, of different ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    return {f"rank-{rank}": tiny_adapter.make_adapter(folder / f"rank-{rank}", rank, seed=rank) for rank in (4, 8)}


@pytest.fixture(scope="session")
def adapted_ids(tiny_pair: tuple[Path, Path], adapters: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Greedy continuations of the first PROMPTS with each adapter, of the merged weights in plain torch."""
    return {
        name: tiny_adapter.greedy(tiny_adapter.adapted(tiny_pair[0], folder), PROMPTS[:6], 40)
        for name, folder in adapters.items()
    }
