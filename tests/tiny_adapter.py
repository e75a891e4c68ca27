"""LoRA adapters of the tiny target, and what the adapted target says in plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tiny_language as language
import torch
from safetensors.torch import load_file, save_file
from tiny_draft import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, TARGET_CONFIG, TARGET_LAYERS

# Inputs and outputs of each projection that an adapter changes.
_SHAPES = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}
ALPHA, SIZE = 16.0, 0.06


def adapter_that_tells(folder: Path, target: Path, prompts: Sequence[str], tokens: int, rank: int, seed: int):
    """An adapter's folder, and what the adapted target says: the smallest adapter that changes at least one answer.

    The target is trained on each machine anew and differs between them, so one size may change nothing on some.
    """
    plain, size = greedy(adapted(target), prompts, tokens), SIZE
    while size < 64 * SIZE:
        make_adapter(folder, rank, seed, size)
        if (said := greedy(adapted(target, folder), prompts, tokens)) != plain:
            return folder, said
        size *= 2
    raise AssertionError("no adapter of any size changes what the target says")


def make_adapter(folder: Path, rank: int, seed: int, size: float = SIZE) -> Path:
    """An adapter of random matrices, in the layout of PEFT."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(TARGET_LAYERS):
        for name, (inputs, outputs) in _SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.split(".")[1] for name in _SHAPES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapted(target: Path, adapter: Path | None = None):
    """The target in plain torch, with the adapter added to its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = load_file(target / "model.safetensors")
    if adapter is not None:
        low = load_file(adapter / "adapter_model.safetensors")
        scale = ALPHA / json.loads((adapter / "adapter_config.json").read_text())["r"]
        for name, down in low.items():
            if ".lora_A." in name:
                up = low[name.replace(".lora_A.", ".lora_B.")]
                weights[name.removeprefix("base_model.model.").replace(".lora_A", "")] += scale * up @ down
    model = LlamaForCausalLM(LlamaConfig(**TARGET_CONFIG)).float()
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def greedy(model, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """The likeliest continuation of each prompt, whatever its words are."""
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small lose more by a second thread than they gain
    for prompt in prompts:
        ids = torch.tensor([[language.WORDS.index(word) for word in prompt.split()]])
        output, said = model(ids, use_cache=True), []
        for _ in range(tokens):
            said.append(int(output.logits[0, -1].argmax()))
            output = model(torch.tensor([said[-1:]]), past_key_values=output.past_key_values, use_cache=True)
        found.append(said)
    torch.set_num_threads(threads)
    return found
