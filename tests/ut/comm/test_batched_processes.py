"""The batched strategy with reference, torch and native experts on R = 1 and 4 gloo processes.

Proves the dense answer of every rank's own tokens for each kind of experts, layers that share poisoned buffers,
capacity errors on every rank without a hang, and that ranks which disagree are told so. Routing, placement and payloads
at large, and R = 2, 3 and 8, are in test_all_strategies.py. Does not prove NCCL or HCCL.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.errors import AscendMoEError, CapacityError, ConfigError
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.experts.select import make_batched_experts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.data import Routing
from vllm_ascend_moe.testing.launch import launch

pytestmark = pytest.mark.multiprocess
RANKS = (1, 4)
CAPACITY, EXPERTS, TOP_K, H, N = 9, 11, 3, 32, 16
KINDS = ("reference", "torch", *(["native"] if native_available() else []))
STEPS = {
    "exactly C": (lambda ranks: [CAPACITY] * ranks, Routing.UNIFORM),
    "uneven, ids -1 and out of range": (lambda ranks: [(5 * rank + 3) % 7 for rank in range(ranks)], Routing.SKEWED),
    "all to one expert": (lambda ranks: [7 - rank % 3 for rank in range(ranks)], Routing.ONE_EXPERT),
    "idle ranks": (lambda ranks: [1] + [0] * (ranks - 1), Routing.UNIFORM),
    "no tokens": (lambda ranks: [0] * ranks, Routing.UNIFORM),
    "nothing routed": (lambda ranks: [3] * ranks, Routing.NOWHERE),
}


def poison(buffers):
    for buffer in buffers._buffers.values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 77)


def step_inputs(name, rank, ranks, dtype):
    sizes, routing = STEPS[name]
    layout = TokenLayout.of(sizes(ranks), rank)
    tokens = data.token_ids(layout, rank)
    share = 0.3 if "out of range" in name else 0.0
    return {
        "hidden": data.hidden_states(3, tokens, H, dtype),
        "topk_weights": data.topk_weights(3, tokens, TOP_K),
        "topk_ids": data.topk_ids(3, tokens, TOP_K, EXPERTS, routing, invalid_share=share),
        "num_experts": EXPERTS,
        "layout": layout,
    }


@cache
def all_weights(dtype):
    return data.expert_weights(3, range(EXPERTS), H, N, dtype)


def run_step(comms, kind, name, rank, ranks, dtype):
    """Two layers that share buffers; both give the dense answer."""
    given = step_inputs(name, rank, ranks, dtype)
    everything = all_weights(dtype)
    local = comms[0].placement.experts_of(rank)
    weights = replace(everything, w13=everything.w13[local], w2=everything.w2[local])
    outs = []
    for comm in comms:
        poison(comm.buffers)
        sent = comm.dispatch(**given)
        y = torch.full(sent.hidden.shape, float("nan"), dtype=dtype)
        make_batched_experts(kind).apply_batched(sent.hidden, sent.expert_num_tokens, weights, out=y)
        outs.append(comm.combine(y, sent.handle))
    wide = [given["hidden"].double(), given["topk_weights"].double(), given["topk_ids"]]
    wanted = ReferenceExperts().apply(*wide, everything)
    for out in outs:
        assert out.dtype == dtype
        assert_close(out, wanted)


def run_capacity(group, rank, ranks):
    """One rank has a token too many: an error on every rank, and the next step works."""
    placement = ExpertPlacement.linear(EXPERTS, ranks)
    comm = BatchedAllToAll(group, placement, CAPACITY)
    layout = TokenLayout.of([CAPACITY] * (ranks - 1) + [CAPACITY + 1], rank)
    n = layout.local_size
    with pytest.raises(CapacityError):
        comm.dispatch(torch.ones(n, H), torch.ones(n, 1), torch.zeros(n, 1).int(), num_experts=EXPERTS, layout=layout)
    run_step([comm], "reference", "exactly C", rank, ranks, torch.float32)


def run_agreement(group, rank, ranks):
    placement = ExpertPlacement.linear(EXPERTS, ranks)
    BatchedAllToAll(group, placement, CAPACITY).check_capacity_agrees()
    if ranks > 1:
        with pytest.raises(CapacityError, match="capacity by rank"):
            BatchedAllToAll(group, placement, CAPACITY + (rank == 0)).check_capacity_agrees()
        other = ExpertPlacement.round_robin(EXPERTS, ranks)
        with pytest.raises(ConfigError, match="placement by rank"):
            BatchedAllToAll(group, other if rank == 0 else placement, CAPACITY).check_capacity_agrees()


def run_exact(group, rank, ranks):
    """fp32, the same bits as all-to-all by row on the reference experts."""
    placement = ExpertPlacement.round_robin(EXPERTS, ranks)
    given = step_inputs("uneven, ids -1 and out of range", rank, ranks, torch.float32)
    weights = data.expert_weights(3, placement.experts_of(rank), H, N)
    batched, rows = BatchedAllToAll(group, placement, CAPACITY, exact=True), AllToAll(group, placement, exact=True)
    sent = batched.dispatch(**given)
    y = ReferenceExperts().apply_batched(sent.hidden, sent.expert_num_tokens, weights)
    mine = batched.combine(y, sent.handle)
    sent = rows.dispatch(**given)
    expert_map = placement.expert_map(rank)
    y = ReferenceExperts().apply(sent.hidden, sent.topk_weights, sent.topk_ids, weights, expert_map=expert_map)
    assert_equal(mine, rows.combine(y, sent.handle))


def body(rank, ranks):
    """Runs in each process: by name "ok" or what is wrong. Comparisons fail after collectives: ranks stay together."""
    group, cache, report = TorchGroup(dist.group.WORLD), BufferCache(), {}
    checks = {"capacity": run_capacity, "agreement": run_agreement, "exact": run_exact}
    bodies = {name: lambda check=check: check(group, rank, ranks) for name, check in checks.items()}
    comms = [BatchedAllToAll(group, ExpertPlacement.linear(EXPERTS, ranks), CAPACITY, buffers=cache) for _ in range(2)]
    for kind, dtype, name in CASES:
        bodies[kind, dtype, name] = lambda *case: run_step(comms, case[0], case[2], rank, ranks, case[1])
    for key, run in bodies.items():
        try:
            run(*key) if isinstance(key, tuple) else run()
            report[key] = "ok"
        except (AssertionError, AscendMoEError, pytest.fail.Exception) as error:
            report[key] = f"{type(error).__name__}: {error}"
    return report


# fp32 for each kind of experts, 16-bit types for those that engines use.
CASES = [(KINDS[-1], dtype, name) for dtype in (torch.bfloat16, torch.float16) for name in STEPS]
CASES += [(kind, torch.float32, name) for kind in KINDS for name in STEPS]


@cache
def reports(ranks):
    """One launch per R serves all its tests."""
    return launch(ranks, body, timeout_s=60)


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: f"R={ranks}")
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_the_dense_answer(ranks, kind):
    for case in CASES:
        if case[0] == kind:
            assert [report[case] for report in reports(ranks)] == ["ok"] * ranks, case


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: f"R={ranks}")
@pytest.mark.parametrize("name", ["capacity", "agreement", "exact"])
def test_on_real_processes(ranks, name):
    assert [report[name] for report in reports(ranks)] == ["ok"] * ranks
