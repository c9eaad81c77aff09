"""All-to-all by row over NCCL on 2 and 4 ranks: rows, dense answers, exact mode, one wait.

On a machine with GPUs: pytest tests/e2e/cuda/test_all_to_all_nccl.py. Ranks share GPUs where there are fewer, and NCCL
then goes through its network transport on the loopback interface.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[2] / "ut"), str(Path(__file__).parents[2] / "ut" / "comm")]

import rows_cases  # noqa: E402
import strategy_cases  # noqa: E402

from vllm_ascend_moe.comm.all_to_all import AllToAll  # noqa: E402
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather  # noqa: E402
from vllm_ascend_moe.ops.native import TorchGroup  # noqa: E402
from vllm_ascend_moe.testing.compare import assert_close, assert_equal  # noqa: E402
from vllm_ascend_moe.testing.launch import launch  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; see the module's docstring"),
]


def weighted(sent, case, mine):
    """Expert e multiplies by e + 1; the row's sum over experts in ``mine``, in fp32."""
    ids = sent.topk_ids.long()
    here = torch.isin(ids, torch.tensor(mine, device=ids.device, dtype=torch.long))
    factors = torch.where(here, (ids + 1).float() * sent.topk_weights, 0.0).sum(1, keepdim=True)
    return (torch.where(factors != 0, sent.hidden.float(), 0.0) * factors).to(case.dtype)


def run_case(group, case, rank, ranks):
    case = rows_cases.on(case, ranks)
    placement = rows_cases.placement_of(case, ranks)
    host = strategy_cases.poison(strategy_cases.make_tokens(case, rank, ranks), case)
    tokens = dataclasses.replace(
        host, hidden=host.hidden.cuda(), topk_weights=host.topk_weights.cuda(), ids=host.ids.cuda()
    )
    outs = []
    for comm in (
        AllToAll(group, placement),
        AllToAll(group, placement, exact=True),
        PaddedAllGather(group, exact=True),
    ):
        sent = rows_cases.dispatch(comm, case, tokens)
        if isinstance(comm, AllToAll):
            expected = rows_cases.expected_rows(case, placement, rank)
            cpu = dataclasses.replace(
                sent, hidden=sent.hidden.cpu(), topk_weights=sent.topk_weights.cpu(), topk_ids=sent.topk_ids.cpu()
            )
            rows_cases.check_rows(cpu, expected)
        outs.append(comm.combine(weighted(sent, case, placement.experts_of(rank)), sent.handle).cpu())
    valid = (host.ids >= 0) & (host.ids < case.num_experts)
    share = torch.where(valid, (host.ids + 1) * host.topk_weights, 0.0).sum(1, keepdim=True)
    assert_close(outs[0], torch.where(share != 0, host.hidden.float(), 0.0) * share)
    assert_equal(outs[1], outs[2], what="exact modes")


def count_waits(group, rank, ranks):
    """Host waits of a layer: by CUDA's own warning, and for events, of which it does not warn."""
    case = rows_cases.on(rows_cases.CASES["uneven"], ranks)
    tokens = strategy_cases.make_tokens(case, rank, ranks)
    hidden, weights, ids = tokens.hidden.cuda(), tokens.topk_weights.cuda(), tokens.ids.cuda()
    comm = AllToAll(group, rows_cases.placement_of(case, ranks))

    def layer():
        sent = comm.dispatch(hidden, weights, ids, num_experts=case.num_experts, layout=tokens.layout)
        comm.combine(sent.hidden, sent.handle)

    layer()
    import warnings

    waits, wait = [], torch.cuda.Event.synchronize
    torch.cuda.Event.synchronize = lambda event: (waits.append("event"), wait(event))[1]
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.Event.synchronize = wait
    return waits + [str(warning.message) for warning in caught if "synchronizing" in str(warning.message)]


def body(rank, ranks):
    group, report = TorchGroup(dist.group.WORLD), {}
    for name, case in rows_cases.CASES.items():
        try:
            run_case(group, case, rank, ranks)
        except AssertionError as error:
            report[name] = str(error)
    return report, count_waits(group, rank, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_arrive_as_described_and_the_host_waits_once(ranks):
    for report, waits in launch(ranks, body, backend="nccl", timeout_s=120):
        assert report == {}
        assert len(waits) == 1, waits
