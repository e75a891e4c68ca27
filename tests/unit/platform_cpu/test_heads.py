"""What the host notes about heads on a CPU is forgotten where it changed nothing."""

from types import SimpleNamespace

from sglang_adaptive.patches.cpu_models import PATCHES


def configuration(heads: int, noted: int) -> SimpleNamespace:
    return SimpleNamespace(num_attention_heads=heads, original_num_attention_heads=noted, original_total_num_kv_heads=2)


def test_unpadded_heads_are_not_noted_and_padded_ones_are():
    (patch,) = PATCHES
    same, padded = configuration(4, 4), configuration(6, 4)
    patch.hook(SimpleNamespace(hf_config=same, hf_text_config=same))
    assert not hasattr(same, "original_num_attention_heads") and not hasattr(same, "original_total_num_kv_heads")
    patch.hook(SimpleNamespace(hf_config=padded, hf_text_config=padded))
    assert padded.original_num_attention_heads == 4
