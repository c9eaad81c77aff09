"""The padded layout on R = 2, 3, 4 and 8 gloo processes: the two operators, and the strategy with reference experts.

Proves that marked rows of every dtype make the round trip through the operators; that every rank gets the dense answer
for its own tokens, whatever the sizes, routing, ids, placement and dtype; that NaN in pad rows and unrouted slots
reaches no token, and that wrong id dtypes are an error and not a hang; with one packed gather and with one gather a
tensor, native (where the extension is built) and in plain torch. Does not prove NCCL or HCCL, nor the fast experts.
"""

from functools import cache

import mp_operators
import pytest
import strategy_cases
import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.errors import DtypeError
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.launch import launch

pytestmark = pytest.mark.multiprocess
RANKS = (2, 3, 4, 8)


class PlainGroup:
    """A group that native code cannot find, so that plain torch is used."""

    def __init__(self, group):
        self.world_size, self.rank_in_group = group.world_size, group.rank_in_group
        self.all_gather, self.reduce_scatter = group.all_gather, group.reduce_scatter


VARIANTS = {
    "packed": lambda group: PaddedAllGather(group),
    "one by one": lambda group: PaddedAllGather(group, packed_bytes=0),
    "plain torch, packed": lambda group: PaddedAllGather(PlainGroup(group)),
    "plain torch, one by one": lambda group: PaddedAllGather(PlainGroup(group), packed_bytes=0),
}


def variants_of(ranks):
    """Plain torch does the same on 2 and on 8 ranks, more slowly; so it runs on few."""
    return [name for name in VARIANTS if ranks <= 3 or not name.startswith("plain torch")]


def body(rank, ranks):
    """Runs in each process: by variant and name "ok" or what is wrong."""
    group, reports = TorchGroup(dist.group.WORLD), {}
    for variant in variants_of(ranks):
        comm = VARIANTS[variant](group)
        reports[variant] = strategy_cases.run_all(comm, rank, ranks) | {"id dtypes": id_dtypes(comm, rank, ranks)}
    sizes = {made.__name__: made(ranks) for made in strategy_cases.SIZE_VECTORS}
    reports["operators"] = mp_operators.run_operators(rank, ranks, sizes)
    return reports


def id_dtypes(comm, rank, ranks):
    """Ids of a type that no collective or kernel takes, on all ranks, then a good dispatch: nobody hangs."""
    layout = TokenLayout.of(strategy_cases.uneven(ranks), rank)
    tokens = data.token_ids(layout, rank)
    hidden, weights = data.hidden_states(1, tokens, 4, torch.float32), data.topk_weights(1, tokens, 2)
    ids = data.topk_ids(1, tokens, 2, 8)
    for dtype in (torch.uint32, torch.float32, torch.int16):
        try:
            comm.dispatch(hidden, weights, ids.to(dtype), num_experts=8, layout=layout)
        except DtypeError as error:
            if "int32 or int64" not in str(error):
                return str(error)
        else:
            return f"{dtype} was accepted"
    local = data.local_experts(8, rank, ranks)
    outs = []
    for dtype in (torch.int32, torch.int64):
        sent = comm.dispatch(hidden, weights, ids.to(dtype), num_experts=8, layout=layout)
        if sent.topk_ids.dtype != dtype:
            return f"{dtype} ids arrived as {sent.topk_ids.dtype}"
        y = ReferenceExperts().apply(
            sent.hidden,
            sent.topk_weights,
            sent.topk_ids,
            data.expert_weights(1, local, 4, 8),
            expert_map=data.expert_map(8, local),
        )
        outs.append(comm.combine(y, sent.handle))
    return "ok" if torch.equal(*outs) else "int32 and int64 ids give different results"


@cache
def reports(ranks):
    """One launch per R serves all its tests."""
    return launch(ranks, body, timeout_s=60)


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [pytest.param(ranks, name, id=f"R={ranks}, {name}") for ranks in RANKS for name in variants_of(ranks)],
)
@pytest.mark.parametrize("name", [*strategy_cases.NAMES, "id dtypes"])
def test_every_rank_gets_the_dense_answer(ranks, variant, name):
    found = {rank: report[variant][name] for rank, report in enumerate(reports(ranks))}
    assert found == dict.fromkeys(range(ranks), "ok")


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: f"R={ranks}")
@pytest.mark.parametrize("name", [*(s.__name__ for s in strategy_cases.SIZE_VECTORS), "DP metadata", "no metadata"])
def test_marked_rows_make_the_round_trip_through_the_operators(ranks, name):
    found = {rank: report["operators"][name] for rank, report in enumerate(reports(ranks))}
    assert found == dict.fromkeys(range(ranks), "ok")
