"""Draft checkpoints that behave badly: they load and serve, and the output must be the target's all the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def _changed(draft: Path, folder: Path, change) -> Path:
    shutil.copytree(draft, folder)
    weights = load_file(draft / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def without_confidence(draft: Path, folder: Path) -> Path:
    """A copy of ``draft`` whose confidence head says NaN for every token."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["confidence_head.proj.weight"].fill_(float("nan"))

    return _changed(draft, folder, change)


def stubborn(draft: Path, folder: Path, token: int) -> Path:
    """A copy of ``draft`` that proposes ``token`` whatever was said, with a confidence of one half each time."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"):
            weights[name].zero_()
        weights["markov_head.markov_w1.weight"][:, 0] = 1.0
        weights["markov_head.markov_w2.weight"][token, 0] = 1e4
        weights["confidence_head.proj.bias"].zero_()

    return _changed(draft, folder, change)
