"""Passes of a bounded number of tokens bound the memory of dispatch, experts and combine, whatever the strategy.

Peaks are the process's own, as the kernel counts them (VmHWM), beyond what it held before and the layer's output.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.base import ActivationFormat, TokenComm
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.select import make_batched_experts, make_rows_experts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing.launch import launch

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; run it on Linux"),
]

RANKS, TOKENS, IN_FLIGHT = 2, 8192, 256
H, N, E, K = 512, 32, 8, 4
MIB = 1 << 20
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _bytes_of(field: str) -> int:
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) << 10


def _run(
    comm: TokenComm, weights: ExpertWeights, inputs: list[torch.Tensor], layout: TokenLayout, max_tokens: int
) -> torch.Tensor:
    hidden, topk_weights, ids = inputs
    rank, experts = layout.rank, ExpertPlacement.linear(E, RANKS)
    output, start = torch.zeros_like(hidden), 0
    for part in layout.chunks(max_tokens):
        rows = slice(start, start + part.local_size)
        start = rows.stop
        sent = comm.dispatch(hidden[rows], topk_weights[rows], ids[rows], num_experts=E, layout=part)
        if comm.format is ActivationFormat.BATCHED:
            assert sent.expert_num_tokens is not None
            done = make_batched_experts().apply_batched(sent.hidden, sent.expert_num_tokens, weights)
        else:
            assert sent.topk_weights is not None
            assert sent.topk_ids is not None
            done = make_rows_experts().apply(
                sent.hidden, sent.topk_weights, sent.topk_ids, weights, expert_map=experts.expert_map(rank)
            )
        output[rows] = comm.combine(done, sent.handle)
    return output


def measure(rank: int, ranks: int) -> dict[str, tuple[int, int, float]]:
    """By strategy: peak bytes of all tokens at once, of passes, and the largest difference of the results."""
    group, placement = TorchGroup(dist.group.WORLD), ExpertPlacement.linear(E, ranks)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn((TOKENS - 100 * rank, H), generator=generator)
    ids = torch.rand((hidden.shape[0], E), generator=generator).topk(K).indices.to(torch.int32)
    inputs = [hidden, torch.rand((hidden.shape[0], K), generator=generator), ids]
    weights = ExpertWeights(w13=torch.randn(E // ranks, 2 * N, H) * 0.1, w2=torch.randn(E // ranks, H, N) * 0.1)
    layout = TokenLayout.of([TOKENS - 100 * r for r in range(ranks)], rank)
    found = {}
    for name in ("padded_allgather", "all_to_all", "batched_all_to_all"):
        peaks, outputs = [], []
        for max_tokens in (TOKENS, IN_FLIGHT):
            comm: TokenComm = {
                "padded_allgather": lambda: PaddedAllGather(group),
                "all_to_all": lambda: AllToAll(group, placement),
                "batched_all_to_all": lambda size=max_tokens: BatchedAllToAll(group, placement, size),
            }[name]()
            # What earlier runs freed must not be there to be used again.
            ctypes.CDLL(None).malloc_trim(0)
            before = _bytes_of("VmRSS")
            _RESET.write_text("5")
            outputs.append(_run(comm, weights, inputs, layout, max_tokens))
            # Without the result, which both make.
            peaks.append(_bytes_of("VmHWM") - before - hidden.nbytes)
        found[name] = (*peaks, (outputs[0] - outputs[1]).abs().max().item())
    return found


def test_passes_bound_memory() -> None:
    results = launch(RANKS, measure, timeout_s=60)
    for name in results[0]:
        for whole, passes, difference in (result[name] for result in results):
            assert difference < 1e-4
            # All tokens at once: at least the rows of all ranks, in and out of the experts.
            assert whole > 2 * TOKENS * H * 4
            assert passes < whole / 6, f"{name}: {whole / MIB:.0f} MiB at once, {passes / MIB:.0f} MiB in passes"
