"""Packed products: correct, independent of the batch, renewed with the weight."""

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from sglang_adaptive.platform_cpu import linear

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN: nothing is packed"
)


def make_weight(out: int, width: int) -> torch.Tensor:
    return torch.nn.Parameter(torch.randn(out, width) * 0.05, requires_grad=False)


@pytest.mark.parametrize("shape", [(64, 32), (576, 1536), (3072, 576)])
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 64])
def test_product(shape, rows):
    torch.manual_seed(0)
    weight, x, bias = make_weight(*shape), torch.randn(rows, shape[1]), torch.randn(shape[0])
    packed = linear.PackedWeight(weight)
    expected = (x.double() @ weight.double().T + bias.double()).float()
    torch.testing.assert_close(packed.product(x, weight, bias), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(64, 32), (576, 1536), (3072, 576)])
def test_a_row_does_not_depend_on_its_neighbours(shape):
    torch.manual_seed(0)
    weight, x = make_weight(*shape), torch.randn(100, shape[1])
    packed = linear.PackedWeight(weight)
    whole = packed.product(x, weight, None)
    for rows in (1, 2, 3, 8, 17, 64):
        assert torch.equal(packed.product(x[:rows], weight, None), whole[:rows])


def test_a_weight_update_reaches_the_product():
    torch.manual_seed(0)
    weight, x = make_weight(64, 32), torch.randn(4, 32)
    packed = linear.PackedWeight(weight)
    before = packed.product(x, weight, None)
    weight.data.copy_(weight.data * 2)
    linear.weights_changed()
    torch.testing.assert_close(packed.product(x, weight, None), before * 2)


def test_a_weight_that_is_replaced_reaches_the_product():
    """A draft takes over the target's head after it was loaded and packed."""
    torch.manual_seed(0)
    weight, other, x = make_weight(64, 32), make_weight(64, 32), torch.randn(4, 32)
    packed = linear.PackedWeight(weight)
    torch.testing.assert_close(packed.product(x, other, None), x @ other.T)


class Layer(torch.nn.Module):
    def __init__(self, method, dtype=torch.float32):
        super().__init__()
        self.quant_method = method
        self.weight = torch.nn.Parameter(torch.randn(8, 4, dtype=dtype), requires_grad=False)


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.proj = Layer(UnquantizedLinearMethod(), dtype)
        self.embed = Layer(UnquantizedEmbeddingMethod(), dtype)
        self.lm_head = Layer(UnquantizedEmbeddingMethod(), dtype)


def test_linear_layers_and_the_head_are_packed_but_not_an_embedding():
    model = Model()
    assert linear.pack_linear_layers(model) == 2
    assert isinstance(model.proj.quant_method, linear.PackedLinearMethod)
    assert isinstance(model.lm_head.quant_method, linear.PackedHeadMethod)
    assert type(model.embed.quant_method) is UnquantizedEmbeddingMethod
    ids = torch.tensor([3, 1])
    assert torch.equal(model.lm_head.quant_method.embedding(model.lm_head, ids), model.lm_head.weight[ids])


def test_the_host_calls_the_packed_head():
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    model = Model()
    assert not should_apply_lm_head_quant_method(model.lm_head, model.lm_head.quant_method)
    linear.pack_linear_layers(model)
    assert should_apply_lm_head_quant_method(model.lm_head, model.lm_head.quant_method)


def test_nothing_is_packed_in_another_dtype_or_without_memory(monkeypatch):
    assert linear.pack_linear_layers(Model(torch.bfloat16)) == 0
    monkeypatch.setattr(linear, "MEMORY_SHARE", 0.0)
    assert linear.pack_linear_layers(Model()) == 0
