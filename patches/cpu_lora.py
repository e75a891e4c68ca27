"""CPU platform, LoRA adapters: applied before the target's layers are wrapped."""

from __future__ import annotations

from sglang_adaptive.patches.registry import Edit, Patch

_LAYERS = "sglang.srt.lora.layers"
_WHY = "It pins memory whatever the device, which torch refuses without an accelerator."
_REMOVE = "the host asks the platform's is_pin_memory_available here, as its adapter pool does."


def _unpinned(method: str, *, old: str = "pin_memory=True", new: str = "pin_memory=False") -> Patch:
    return Patch(
        target=f"{_LAYERS}.{method}", why=_WHY, remove_when=_REMOVE, kind="edit", edits=(Edit(old=old, new=new),)
    )


PATCHES = [
    _unpinned("VocabParallelEmbeddingWithLoRA.__init__"),
    _unpinned("ParallelLMHeadWithLoRA.__init__"),
    _unpinned("ColumnParallelLinearWithLoRA.__init__"),
    _unpinned("MergedColumnParallelLinearWithLoRA.set_lora_info", old=".cpu().pin_memory()", new=".cpu()"),
    _unpinned("QKVParallelLinearWithLoRA.__init__"),
    _unpinned("RowParallelLinearWithLoRA.set_lora_info"),
]
