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
def adapters_and_answers(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory):
    """Two LoRA adapters of the tiny target, of different ranks, and what the first PROMPTS get with each."""
    folder, asked = tmp_path_factory.mktemp("adapters"), (tiny_pair[0], PROMPTS[:6], 40)
    return {f"rank-{r}": tiny_adapter.adapter_that_tells(folder / f"rank-{r}", *asked, r, seed=r) for r in (4, 8)}


@pytest.fixture(scope="session")
def adapters(adapters_and_answers) -> dict[str, Path]:
    """Folders of the adapters."""
    return {name: folder for name, (folder, _) in adapters_and_answers.items()}


@pytest.fixture(scope="session")
def adapted_ids(adapters_and_answers) -> dict[str, list[list[int]]]:
    """Greedy continuations of the first PROMPTS with each adapter, of the merged weights in plain torch."""
    return {name: said for name, (_, said) in adapters_and_answers.items()}
