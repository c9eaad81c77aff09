"""vLLM's own CPU kernel under expert parallelism: with local ids it computes what the reference computes, for every
rank's share of the experts, and what is not routed to a rank adds exactly nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.integration.local_ids import LocalIdsPrepareFinalize, make_ids_local
from vllm_ascend_moe.integration.prepare_finalize import LocalPrepareFinalize
from vllm_ascend_moe.testing.compare import assert_close

E, H, N, K, ROWS = 8, 64, 32, 3, 21


def vllm_cpu_experts(x, ids, weights, w13, w2):
    """cpu_fused_moe as vLLM's portable CPU experts call it."""
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    out = torch.full_like(x, float("nan"))
    packed = [cpu_prepack_moe_weight(w, "vec") for w in (w13, w2)]
    cpu_fused_moe(out, x, *packed, None, None, weights, ids, "silu", "vec", False)
    return out


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_rank_computes_its_share(ranks: int, dtype: torch.dtype) -> None:
    torch.manual_seed(ranks)
    x = torch.randn(ROWS, H).to(dtype)
    w13, w2 = torch.randn(E, 2 * N, H).to(dtype) * 0.2, torch.randn(E, H, N).to(dtype) * 0.2
    ids = torch.rand(ROWS, E).argsort(1)[:, :K].to(torch.int32)
    ids[4], ids[7, 1] = -1, -1  # a pad row, and one choice that is not routed
    weights = torch.rand(ROWS, K)
    total = torch.zeros(ROWS, H)
    for rank in range(ranks):
        mine = range(rank * E // ranks, (rank + 1) * E // ranks)
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[list(mine)] = torch.arange(len(mine), dtype=torch.int32)
        step = LocalIdsPrepareFinalize(LocalPrepareFinalize(), len(mine))
        hidden, _, _, local_ids, local_weights = step.prepare(x, weights, ids, E, expert_map, False, None)
        assert local_ids.dtype == torch.int32
        assert int(local_ids.min()) >= 0
        assert int(local_ids.max()) < len(mine)
        share = vllm_cpu_experts(hidden, local_ids, local_weights, w13[list(mine)], w2[list(mine)])
        total += share.float()
    expected = ReferenceExperts().apply(x.float(), weights, ids, ExpertWeights(w13=w13, w2=w2))
    assert_close(total.to(dtype), expected.to(dtype))
    assert torch.equal(total[4], torch.zeros(H))


def test_router_weight_on_input_silences_the_row() -> None:
    step = LocalIdsPrepareFinalize(LocalPrepareFinalize(), 1)
    expert_map = torch.tensor([0, -1], dtype=torch.int32)
    ids, weights = torch.tensor([[0], [1]], dtype=torch.int32), torch.full((2, 1), 0.5)
    hidden, *_ = step.prepare(torch.ones(2, 4), weights, ids, 2, expert_map, True, None)
    assert hidden.tolist() == [[0.5] * 4, [0.0] * 4]


def test_a_method_whose_ids_cannot_be_reached_is_refused() -> None:
    method = SimpleNamespace(moe_kernel=None)
    with pytest.raises(UnsupportedError, match="layers_3: SimpleNamespace ignores the expert map"):
        make_ids_local(method, "layers_3", 4)
