"""NPU experts and the fused strategy under torch.compile, as one graph without a break (backend aot_eager).

Proves that Dynamo and AOTAutograd take them, with new token counts too, and that results are those of eager bit for
bit. No backend that generates code for an NPU runs here.
"""

from __future__ import annotations

import logging
import random
from dataclasses import fields, replace

import fused_ranks
import pytest
import torch
from exchange_cases import Case

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.npu import NpuExperts
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights
from vllm_ascend_moe.ops.npu import token_unpermute_operator
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.launch import launch

H, N, E, K = 40, 24, 6, 3
LOCAL = [0, 2, 5]
BF16 = torch.bfloat16


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 16)  # by the test's name: tests/conftest.py
    logging.getLogger(__name__).warning("seed %d", value)  # shown where a test fails
    torch._dynamo.reset()
    return value


def weights_of(seed: int, quantized: bool, bias: bool) -> ExpertWeights:
    weights = data.expert_weights(seed, LOCAL, H, N, BF16, bias=bias)
    used = ScaledExpertWeights.quantize(weights) if quantized else weights
    tensors = {f.name: getattr(used, f.name) for f in fields(used)}
    return replace(used, **{name: x.npu() for name, x in tensors.items() if x is not None})


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_rows(quantized, bias, dynamic, seed):
    weights, kernel, expert_map = weights_of(seed, quantized, bias), NpuExperts(), data.expert_map(E, LOCAL).npu()

    def layer(*rows: torch.Tensor) -> torch.Tensor:
        return kernel.apply(*rows, weights, expert_map=expert_map)

    graph = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for count in (5, 17, 1):
        tokens = torch.arange(count)
        ids = data.topk_ids(seed, tokens, K, E, invalid_share=0.3)
        rows = data.hidden_states(seed, tokens, H, BF16), data.topk_weights(seed, tokens, K), ids
        given = [x.npu() for x in rows]
        assert torch.equal(graph(*given), layer(*given))


@pytest.mark.parametrize("quantized", [False, True])
def test_batched(quantized, seed):
    weights, kernel = weights_of(seed, quantized, bias=True), NpuExperts()

    def layer(hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return kernel.apply_batched(hidden, counts, weights)

    graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows, filled in ((5, [5, 0, 2]), (9, [0, 9, 1])):
        hidden = data.hidden_states(seed, torch.arange(3 * rows), H, BF16).view(3, rows, H).npu()
        counts = torch.tensor(filled, dtype=torch.int32).npu()
        assert torch.equal(graph(hidden, counts), layer(hidden, counts))


def test_the_unpermute_operator_gives_new_results_and_its_fake_their_form(seed):
    rows, positions = torch.randn(9, H, dtype=BF16).npu(), torch.randperm(9, dtype=torch.int32).npu()
    given = rows, positions, torch.rand(3, 3).npu()
    torch.library.opcheck(token_unpermute_operator(), given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_layer_with_fused_dispatch_and_combine(ranks):
    case = Case((3, 7), top_k=3, hidden_size=64, invalid_share=0.3, dtype=BF16, seed=4)
    sizes = ((3, 7), (0, 5))
    assert launch(ranks, fused_ranks.compiled, case, sizes, backend="hccl") == [[True] * 4] * ranks
