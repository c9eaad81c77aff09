"""All-gather without pad rows over NCCL, which makes grouped broadcasts and reductions of it, on 2 and 4 ranks.

On a machine with GPUs: pytest tests/e2e/cuda/test_uneven_nccl.py. Ranks share GPUs where there are fewer, and NCCL then
goes through its network transport on the loopback interface.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[2] / "ut"), str(Path(__file__).parents[2] / "ut" / "comm")]

from exchange_cases import Case, Tokens  # noqa: E402

from vllm_ascend_moe.comm.payload import quantize_tokens  # noqa: E402
from vllm_ascend_moe.comm.uneven_all_gather import UnevenAllGather  # noqa: E402
from vllm_ascend_moe.ops.native import TorchGroup  # noqa: E402
from vllm_ascend_moe.testing.compare import assert_close, assert_equal  # noqa: E402
from vllm_ascend_moe.testing.launch import launch  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; see the module's docstring"),
]

SIZES = {2: [(3, 7), (0, 4), (1, 0), (0, 0), (1, 64)], 4: [(3, 1, 6, 4), (0, 4, 0, 4), (0, 0, 0, 5), (0, 0, 0, 0)]}


def check(comm: UnevenAllGather, case: Case, rank: int, quantized: bool) -> None:
    everyone = [Tokens.of(case, each) for each in range(len(case.sizes))]
    mine = everyone[rank]
    hidden, weights, ids = (x.cuda() for x in (mine.hidden, mine.weights, mine.ids))
    values, scales = quantize_tokens(hidden, "int8") if quantized else (hidden, None)
    sent = comm.dispatch(values, weights, ids, num_experts=case.num_experts, layout=mine.layout, scales=scales)
    if quantized:
        # On the GPU too: its divisions differ from the CPU's in the last bit.
        wanted, wanted_scales = quantize_tokens(torch.cat([t.hidden for t in everyone]).cuda(), "int8")
        assert_equal(sent.scales, wanted_scales)
        assert_equal(sent.hidden, wanted)
        return
    assert_equal(sent.hidden.cpu(), torch.cat([t.hidden for t in everyone]))
    assert_equal(sent.topk_weights.cpu(), torch.cat([t.weights for t in everyone]))
    assert_equal(sent.topk_ids.cpu(), torch.cat([t.ids for t in everyone]))
    out = comm.combine(sent.hidden * (rank + 1), sent.handle)
    assert out.dtype == case.dtype
    assert_close(out.cpu(), mine.hidden.double() * sum(range(1, len(case.sizes) + 1)))


def body(rank: int, ranks: int) -> dict[str, str]:
    group, faults = TorchGroup(dist.group.WORLD), {}
    for sizes in SIZES[ranks]:
        for dtype in (torch.bfloat16, torch.float32):
            for options in ({}, {"packed_bytes": 0}, {"exact": True}):
                case = Case(sizes, dtype=dtype, top_k=3, hidden_size=16)
                for quantized in (False, True):
                    try:
                        check(UnevenAllGather(group, **options), case, rank, quantized)
                    except AssertionError as error:
                        faults[f"{case} {options}"] = str(error)
    return faults


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_arrive_without_pad_and_sums_come_home(ranks: int) -> None:
    assert launch(ranks, body, backend="nccl", timeout_s=60) == [{}] * ranks
