"""Weights written again after loading are used: in the layer's own storage, and as vLLM's layerwise reload does it,
which processes temporary parameters, copies them into the original storage and puts the originals back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe import FusedMoEQuantConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NativeExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.experts.torch_form import TorchExperts
from vllm_ascend_moe.integration.experts import BatchedExpertsStep, RowsExpertsStep, process_weights
from vllm_ascend_moe.testing.compare import assert_close

E, H, N, ROWS = 4, 32, 16, 9


def layer(seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Module()
    for name, shape in (("w13_weight", (E, 2 * N, H)), ("w2_weight", (E, H, N))):
        weight = torch.randn(shape, generator=generator) * 0.3
        module.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    return module


def step(kernel: object, cls: type = RowsExpertsStep):
    """The step without vLLM's constructor, which wants a whole model's configuration."""
    made = cls.__new__(cls)
    made.kernel, made._weights_type = kernel, ExpertWeights
    made.quant_config = FusedMoEQuantConfig.make()
    made.moe_config = SimpleNamespace()
    return made


def check(made: RowsExpertsStep, module: torch.nn.Module, plain: torch.nn.Module) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(ROWS, H), torch.rand(ROWS, 2)
    ids = torch.randint(-1, E, (ROWS, 2), dtype=torch.int32)
    out = torch.full_like(x, float("nan"))
    made.apply(
        out,
        x,
        module.w13_weight,
        module.w2_weight,
        weights,
        ids,
        MoEActivation.SILU,
        E,
        None,
        None,
        None,
        x,
        x,
        None,
        False,
    )
    expected = ReferenceExperts().apply(x, weights, ids, ExpertWeights(w13=plain.w13_weight, w2=plain.w2_weight))
    assert_close(out, expected)


@pytest.mark.parametrize("kernel", [NativeExperts(), TorchExperts()], ids=["native", "torch"])
def test_written_again_in_place(kernel: object) -> None:
    module, made = layer(1), step(kernel)
    made.process_weights_after_loading(module)
    check(made, module, layer(1))
    for name, parameter in layer(2).named_parameters():
        module.get_parameter(name).copy_(parameter)
    made.process_weights_after_loading(module)
    check(made, module, layer(2))


@pytest.mark.parametrize("kernel", [NativeExperts(), TorchExperts()], ids=["native", "torch"])
def test_layerwise_reload(kernel: object) -> None:
    module, temporary, made = layer(1), layer(2), step(kernel)
    made.process_weights_after_loading(module)
    made.process_weights_after_loading(temporary)
    for name, parameter in temporary.named_parameters():
        module.get_parameter(name).copy_(parameter)
    check(made, module, layer(2))


@pytest.mark.parametrize("kernel", [NativeExperts(), TorchExperts()], ids=["native", "torch"])
def test_kernels_of_both_formats_read_the_same_weights_which_are_packed_once(kernel: object) -> None:
    module, plain = layer(1), layer(1)
    rows, batched = step(kernel), step(kernel, BatchedExpertsStep)
    process_weights([rows, batched, rows], module)
    check(rows, module, plain)
    hidden, counts = torch.randn(E, ROWS, H), torch.tensor([0, ROWS, 3, 1], dtype=torch.int32)
    out = torch.full_like(hidden, float("nan"))
    meta = ExpertTokensMetadata(counts, None)
    nothing = torch.empty(0)
    batched.apply(
        out,
        hidden,
        module.w13_weight,
        module.w2_weight,
        nothing,
        nothing,
        MoEActivation.SILU,
        E,
        None,
        None,
        None,
        nothing,
        nothing,
        meta,
        False,
    )
    weights = ExpertWeights(w13=plain.w13_weight, w2=plain.w2_weight)
    expected = ReferenceExperts().apply_batched(hidden, counts, weights)
    for expert, count in enumerate(counts.tolist()):
        assert_close(out[expert, :count], expected[expert, :count])
        assert out[expert, count:].isnan().all()
