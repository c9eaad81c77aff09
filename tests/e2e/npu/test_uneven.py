"""All-gather without pad rows uses HCCL's own collectives of uneven sizes.

That its answers are right is tested with all strategies (test_strategies.py). This counts what reaches HCCL, which the
soft NPU alone can.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from exchange_cases import Case, Tokens

from vllm_ascend_moe.comm.uneven_all_gather import UnevenAllGather
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.testing.launch import launch

SOFT = pytest.mark.skipif(os.environ.get("ASCEND_MOE_SOFTNPU") != "1", reason="counts work on the soft NPU alone")


def count(rank: int, ranks: int, case: Case) -> list[tuple[dict[str, int], tuple[int, ...], torch.Tensor]]:
    """Packed, and one by one."""
    from vllm_ascend_moe.softnpu.counts import counts, reset_counts

    torch.npu.set_device(rank)
    tokens, found = Tokens.of(case, rank), []
    given = [x.npu() for x in (tokens.hidden, tokens.weights, tokens.ids)]
    for packed_bytes in (1 << 20, 0):
        comm = UnevenAllGather(TorchGroup(dist.group.WORLD), packed_bytes)
        reset_counts()
        sent = comm.dispatch(*given, num_experts=case.num_experts, layout=tokens.layout)
        out = comm.combine(torch.ones_like(sent.hidden), sent.handle)
        calls = {name: number for name, number in counts().items() if name.startswith("Hccl")}
        found.append((calls, tuple(sent.hidden.shape), out.cpu()))
    return found


@SOFT
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_what_reaches_hccl(ranks):
    case = Case((40, 0, 1, 3), dtype=torch.bfloat16)
    for rank, found in enumerate(launch(ranks, count, case, backend="hccl")):
        for (calls, shape, out), gathers in zip(found, (1, 3), strict=True):
            assert calls == {"HcclAllGatherV": gathers, "HcclReduceScatterV": 1}
            assert shape == (44, 8), "no pad row"
            assert torch.equal(out, torch.full((case.sizes[rank], 8), 4, dtype=torch.bfloat16))
