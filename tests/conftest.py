"""What the tests share: the pairs of models, and a server without speculation to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import tiny_eagle
import tiny_pair as tiny
from server import Server

from sglang_adaptive.launch import models

_NO_GPU = "no CUDA GPU on this machine"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=_NO_GPU))


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if _NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.section("GPU tests did not run", yellow=True, bold=True)
        terminalreporter.write_line(f"{len(skipped)} tests need a GPU: {_NO_GPU}. Their claims are not checked here.")


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers write their output."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def tiny_pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Folders of the tiny target and its draft; the first use trains them, which takes a minute."""
    return tiny.tiny_pair(Path(request.config.cache.mkdir("sglang_adaptive")))


@pytest.fixture(scope="session")
def tiny_eagle3_pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Folders of the tiny target and an EAGLE3 draft of it; the first use trains them."""
    return tiny_eagle.tiny_eagle3_pair(Path(request.config.cache.mkdir("sglang_adaptive")))


@pytest.fixture(scope="session")
def tiny_eagle_pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Folders of the tiny target and an EAGLE draft of it; the first use trains it."""
    return tiny_eagle.tiny_eagle_pair(Path(request.config.cache.mkdir("sglang_adaptive")))


@pytest.fixture(scope="session")
def tiny_mtp_target(request: pytest.FixtureRequest) -> Path:
    """Folder of a target that says what the tiny one says, and carries an MTP layer; the first use trains it."""
    return tiny_eagle.tiny_mtp_target(Path(request.config.cache.mkdir("sglang_adaptive")))


@pytest.fixture(scope="session")
def smollm2_pair() -> tuple[Path, Path]:
    """Folders of SmolLM2-135M-Instruct and its draft; the first use on a machine downloads and converts the target."""
    cache_dir = models.default_cache_dir()
    return models.smollm2(cache_dir), models.smollm2_dspark(cache_dir)


@pytest.fixture(scope="session")
def tiny_plain_server(tiny_pair: tuple[Path, Path], log_dir: Path) -> Iterator[Server]:
    """The tiny target without speculation, for reference outputs; it leaves the cores alone when idle.

    It does not overlap: under overlap the host's penalties lag behind the output by a token.
    """
    with Server(tiny_pair[0], "--disable-overlap-schedule", "--sleep-on-idle", log_dir=log_dir) as server:
        yield server
