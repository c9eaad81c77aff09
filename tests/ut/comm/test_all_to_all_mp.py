"""All-to-all by row on R = 1, 2, 3, 4 and 8 gloo processes, and its exact mode against that of the padded strategy.

Proves on a real backend what test_all_to_all.py proves on simulated ranks: rows, order, dense answers, refusals; and
that both strategies give bit for bit the same in exact mode. Does not prove NCCL or HCCL, nor the fast experts.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import rows_cases
import strategy_cases
import torch
import torch.distributed as dist
from rows_cases import Rows
from strategy_cases import Case

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.errors import AscendMoEError, CommError, DtypeError
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_equal
from vllm_ascend_moe.testing.launch import launch

Failed = pytest.fail.Exception  # of pytest.raises, where nothing was raised
pytestmark = pytest.mark.multiprocess
RANKS = (1, 2, 3, 4, 8)
EXACT = {
    f"exact, {dtype}, {placement}".replace("torch.", ""): Case(
        sizes, num_experts=11, top_k=5, dtype=dtype, placement=placement, invalid_share=0.1
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for placement, sizes in (("linear", strategy_cases.uneven), ("round_robin", strategy_cases.with_zeros))
}
NAMES = [*rows_cases.CASES, *EXACT, "refusal"]


def partial_sums(dispatched, placement, rank, case):
    """Experts whose partial sums do not depend on which other rows are there: each row alone, in fp64, rounded once."""
    factors = data.hidden_states(3, torch.arange(case.num_experts), strategy_cases.H, torch.float64)
    slots = placement.expert_map(rank)
    out = torch.zeros(dispatched.hidden.shape, dtype=torch.float64)
    for row, ids in enumerate(dispatched.topk_ids.tolist()):
        for choice, expert in enumerate(ids):
            if 0 <= expert < case.num_experts and slots[expert] >= 0:
                y = dispatched.hidden[row].double() * factors[expert]
                out[row] += y * dispatched.topk_weights[row, choice].double()
    return out.to(case.dtype)


def run_exact(group, case, rank, ranks):
    """Raises AssertionError unless rows, padded and a plain sum over ranks agree in every bit."""
    placement = rows_cases.placement_of(case, ranks)
    tokens = strategy_cases.make_tokens(case, rank, ranks)
    outs = {}
    for comm in (AllToAll(group, placement, exact=True), PaddedAllGather(group, exact=True)):
        sent = rows_cases.dispatch(comm, case, tokens)
        outs[type(comm).__name__] = comm.combine(partial_sums(sent, placement, rank, case), sent.handle)
    total = torch.zeros(tokens.hidden.shape)
    for other in range(ranks):
        alone = Rows(tokens.hidden, tokens.topk_weights, tokens.ids)
        total += partial_sums(alone, placement, other, case).float()
    for name, out in outs.items():
        assert_equal(out, total.to(case.dtype), what=name)


def run_refusal(group, rank, ranks):
    """The last rank has ids no kernel takes; all raise, and all can go on."""
    case = Case(strategy_cases.uneven)
    comm = AllToAll(group, rows_cases.placement_of(case, ranks))
    tokens = strategy_cases.make_tokens(case, rank, ranks)
    wrong = rank == ranks - 1
    with pytest.raises(DtypeError if wrong else CommError, match=None if wrong else rf"ranks \[{ranks - 1}\] refused"):
        rows_cases.dispatch(comm, case, replace(tokens, ids=tokens.ids.float()) if wrong else tokens)
    rows_cases.run_case(comm, case, rank, ranks)


def run_case(group, case, rank, ranks):
    case = rows_cases.on(case, ranks)
    rows_cases.run_case(AllToAll(group, rows_cases.placement_of(case, ranks)), case, rank, ranks)


def body(rank, ranks):
    """Runs in each process: by name "ok" or what is wrong."""
    group, report = TorchGroup(dist.group.WORLD), {}
    bodies = {name: partial(run_case, group, case) for name, case in rows_cases.CASES.items()}
    bodies |= {name: partial(run_exact, group, case) for name, case in EXACT.items()}
    bodies["refusal"] = partial(run_refusal, group)
    for name, one in bodies.items():
        try:
            one(rank, ranks)
            report[name] = "ok"
        except (AssertionError, AscendMoEError, Failed) as error:
            report[name] = f"{type(error).__name__}: {error}"
    return report


@cache
def reports(ranks):
    """One launch per R serves all its tests."""
    return launch(ranks, body, timeout_s=60)


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: f"R={ranks}")
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_gets_its_rows_and_the_dense_answer(ranks, name):
    found = {rank: report[name] for rank, report in enumerate(reports(ranks))}
    assert found == dict.fromkeys(range(ranks), "ok")
