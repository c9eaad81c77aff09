"""Dispatch and combine inside a CUDA graph: captured once, replayed with new data, over NCCL on two ranks.

With one GPU the two ranks share it, and NCCL goes through its network transport on the loopback interface.

pytest tests/e2e/cuda/test_graph_capture.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup, native_group_name
from vllm_ascend_moe.testing.launch import launch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA GPU; run there: pytest tests/e2e/cuda",
    ),
]
RANKS = 2
EXPERTS, TOP_K, HIDDEN = 8, 4, 256


class PlainGroup:
    """Hides the process group, so that the plain torch form runs."""

    def __init__(self, group: TorchGroup) -> None:
        self.world_size, self.rank_in_group = group.world_size, group.rank_in_group
        self.all_gather, self.reduce_scatter = group.all_gather, group.reduce_scatter


def _experts(rank: int, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Stands in for this rank's part of the experts: expert e multiplies a row by e + 1. No host synchronisation."""
    mine = (ids >= rank * EXPERTS // RANKS) & (ids < (rank + 1) * EXPERTS // RANKS)
    scale = torch.where(mine, weights * (ids + 1), 0).sum(1, keepdim=True)
    return (torch.where(scale != 0, hidden.float(), 0) * scale).to(hidden.dtype)


def _layer(comm, layout, rank, hidden, weights, ids):
    sent = comm.dispatch(hidden, weights, ids, num_experts=EXPERTS, layout=layout)
    return comm.combine(_experts(rank, sent.hidden, sent.topk_weights, sent.topk_ids), sent.handle)


def _fill(generator, hidden, weights, ids):
    hidden.copy_(torch.randn(hidden.shape, generator=generator))
    weights.copy_(torch.rand(weights.shape, generator=generator))
    ids.copy_(torch.randint(-1, EXPERTS + 1, ids.shape, generator=generator))


def _body(rank: int, ranks: int, sizes: list[int], packed_bytes: int, replays: int) -> float:
    device = torch.device("cuda", torch.cuda.current_device())
    group = TorchGroup(dist.group.WORLD)
    assert native_group_name(group) is not None, "the native form must be what is captured"
    layout = TokenLayout.of(sizes, rank)
    hidden = torch.zeros(sizes[rank], HIDDEN, dtype=torch.bfloat16, device=device)
    weights = torch.zeros(sizes[rank], TOP_K, device=device)
    ids = torch.full((sizes[rank], TOP_K), -1, dtype=torch.int32, device=device)
    ours = PaddedAllGather(group, packed_bytes=packed_bytes)
    plain = PaddedAllGather(PlainGroup(group), packed_bytes=0)
    generator = torch.Generator().manual_seed(rank)
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                _layer(ours, layout, rank, hidden, weights, ids)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _layer(ours, layout, rank, hidden, weights, ids)
        worst = 0.0
        for _ in range(replays):
            _fill(generator, hidden, weights, ids)
            captured.fill_(float("nan"))
            graph.replay()
            want = _layer(plain, layout, rank, hidden, weights, ids)
            torch.cuda.synchronize()
            assert captured.shape == want.shape == (sizes[rank], HIDDEN)
            torch.testing.assert_close(captured, want, rtol=0, atol=0)
            worst = max([worst, *want.abs().flatten()[:1].tolist()])
        # The graph holds the communicator: gone before the group is destroyed.
        del graph, captured
    return worst


@pytest.mark.parametrize("packed_bytes", [1 << 30, 0], ids=["packed", "coalesced"])
@pytest.mark.parametrize("sizes", [[16, 16], [5, 33], [0, 7]], ids=["even", "uneven", "idle-rank"])
def test_replays_right_with_new_data(sizes, packed_bytes):
    """A replay with new inputs gives what the plain torch form gives eagerly for these inputs."""
    assert len(launch(RANKS, _body, sizes, packed_bytes, 5, backend="nccl")) == RANKS
