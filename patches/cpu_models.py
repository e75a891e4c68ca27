"""CPU platform, model configurations: applied before models are loaded."""

from __future__ import annotations

from typing import Any

from sglang_adaptive.patches.registry import Patch

_NOTES = ("original_num_attention_heads", "original_total_num_kv_heads")


def _forget_heads(model_config: Any, *args: Any, **kwargs: Any) -> None:
    for config in (model_config.hf_config, model_config.hf_text_config):
        noted = getattr(config, _NOTES[0], None)
        if noted is not None and noted == getattr(config, "num_attention_heads", None):
            for name in _NOTES:
                delattr(config, name)


PATCHES = [
    Patch(
        target="sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        why="On a CPU it notes the number of heads even where it pads none. Qwen2's layers then take hidden size by "
        "heads for the size of a head, also where the checkpoint states another, and drop the rows beyond silently.",
        remove_when="the host notes the number only where it changes it.",
        depends=("sglang.srt.models.qwen2.Qwen2DecoderLayer",),
        hook=_forget_heads,
        kind="after",
    ),
]
