"""Float32 matrix products over prepacked weights.

Two to three times as fast as the plain product for the few rows of a decode or verify step, and a row's result does not
depend on the rows beside it: a token verified in a batch gets the very values that decoding it alone would give.
"""

from __future__ import annotations

import psutil
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

# Rows that the packed layout is tuned for.
ROWS_HINT = 128
# Packed copies stay beside the weights, which the host still reads.
MEMORY_SHARE = 0.25


_updates = 0


def weights_changed() -> None:
    """Tell every packed copy of this process that the host wrote its weights; each is renewed at its next use."""
    global _updates
    _updates += 1


class PackedWeight:
    """The packed copy of a weight."""

    def __init__(self, weight: torch.Tensor):
        self._pack(weight)

    def _pack(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        self.updates = _updates
        self.address = weight.data_ptr()

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``; x float32 [..., in], weight float32 [out, in]."""
        # A draft takes over its target's head after it was loaded.
        if self.updates != _updates or self.address != weight.data_ptr():
            self._pack(weight)
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if count == 0:
            return x.new_empty(*x.shape[:-1], weight.shape[0])
        if count == 1:
            # A single row would be summed in another order than the same row in a batch.
            rows = rows.expand(2, -1).contiguous()
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, bias, "none", [], "")
        return out[:count].view(*x.shape[:-1], -1)


class PackedLinearMethod(UnquantizedLinearMethod):
    """The host's linear method over a packed weight."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.packed = PackedWeight(weight)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.packed.product(x, layer.weight, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """The host's output head over a packed weight; its name makes the host call it instead of multiplying itself."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.packed = PackedWeight(weight)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.packed.product(x, layer.weight, bias)


def _plain(module: torch.nn.Module, method: type) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(getattr(module, "quant_method", None)) is method
        and isinstance(weight, torch.Tensor)
        and weight.dtype == torch.float32
        and weight.dim() == 2
    )


def pack_linear_layers(model: torch.nn.Module) -> int:
    """Pack every plain float32 linear layer and output head of a loaded model that memory allows.

    Returns:
        The number of layers packed; 0 where torch was built without oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    linear = [m for m in model.modules() if _plain(m, UnquantizedLinearMethod)]
    # A tied head is the embedding module itself: the host reads that one only through its head method.
    heads = [getattr(model, "lm_head", None)]
    heads = [m for m in heads if m is not None and _plain(m, UnquantizedEmbeddingMethod)]
    size = sum(m.weight.numel() * m.weight.itemsize for m in [*linear, *heads])
    if size > MEMORY_SHARE * psutil.virtual_memory().available:
        return 0
    for module in linear:
        module.quant_method = PackedLinearMethod(module.weight)
    for module in heads:
        module.quant_method = PackedHeadMethod(module.weight)
    return len(linear) + len(heads)
