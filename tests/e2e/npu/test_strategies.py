"""The two operators and every strategy on 1, 2 and 4 NPUs over ProcessGroupHCCL, with reference and with NPU experts.

Proves that npu tensors go through the operators and strategies in both forms, native and plain torch; that exact mode
gives the bits it gives on a CPU; that the engine's way is within the dtype's bound of dense fp64 experts, with NPU
experts too, and W8A8 within its own; whatever the counts, routing, ids, placement and dtype, with NaN wherever nothing
may be read. On the soft NPU it does not prove HCCL's transport, CANN's kernels or the order of streams.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import exchange_cases
import npu_ranks
import pytest
import torch
from exchange_cases import Case

from vllm_ascend_moe.testing.data import Routing
from vllm_ascend_moe.testing.launch import launch

DRAWN = {1: 4, 2: 10, 4: 6}
SIZES = {1: {"some": [3], "none": [0]}, 2: {"uneven": [3, 7], "idle": [0, 4], "none": [0, 0]}}
SIZES[4] = {"uneven": [3, 1, 6, 4], "idle": [0, 4, 0, 4], "one rank": [0, 0, 0, 5], "none": [0] * 4}
BF16 = torch.bfloat16
NAMED = {
    "one token on one rank": Case((1,), dtype=BF16),
    "-1 is no expert, a token of -1 alone is a zero row": Case((1, 1), num_experts=4, ids=((0, -1), (-1, -1))),
    "ids past the last expert and far below": Case((2, 2), num_experts=4, ids=((4, 3), (-7, 0), (1004, 9), (-1, 2))),
    "5 experts on 2 ranks, an odd hidden size": Case((3, 2), num_experts=5, hidden_size=7, dtype=BF16),
    "all tokens to one expert": Case((4, 9), routing=Routing.ONE_EXPERT, dtype=BF16),
    "an idle rank": Case((1, 0), dtype=torch.float16),
    "an expert twice": Case((4, 2), num_experts=4, top_k=3, twice=True),
    "1 and 64 tokens, int8": Case((1, 64), hidden_size=64, payload="int8", dtype=BF16),
    "more ranks than experts": Case((2, 3, 1, 2), num_experts=3, dtype=BF16),
    "all experts on the last rank": Case((3, 2, 1, 0), num_experts=4, placement=(3, 3, 3, 3), dtype=torch.float16),
    "nobody has a token": Case((0, 0, 0, 0)),
}


def cases_of(ranks: int) -> dict[str, Case]:
    """fp8 tokens are int8 here: Atlas A2 has no fp8."""
    drawn = {f"drawn {case.seed}": case for case in exchange_cases.draw(ranks, DRAWN[ranks])}
    named = {name: case for name, case in NAMED.items() if len(case.sizes) == ranks}
    return {name: replace(case, payload=case.payload and "int8") for name, case in (drawn | named).items()}


@cache
def reports(ranks: int) -> list[dict[str, dict[str, str]]]:
    """One launch per R serves all its tests."""
    return launch(ranks, npu_ranks.run, cases_of(ranks), SIZES[ranks], backend="hccl")


def found(ranks: int, form: str, name: str) -> list[str]:
    return [report[form][name] for report in reports(ranks)]


@pytest.mark.parametrize("form", ["native", "plain torch"])
@pytest.mark.parametrize(
    ("ranks", "name"),
    [pytest.param(ranks, name, id=f"R={ranks}, {name}") for ranks in DRAWN for name in [*cases_of(ranks), "gathers"]],
    indirect=["ranks"],
)
def test_every_strategy_gives_the_same_answer(ranks, name, form):
    assert found(ranks, form, name) == ["ok"] * ranks


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, id=f"R={ranks}, {name}")
        for ranks in DRAWN
        for name in [*SIZES[ranks], "DP metadata", "no metadata"]
    ],
    indirect=["ranks"],
)
def test_marked_rows_make_the_round_trip_through_the_operators(ranks, name):
    assert found(ranks, "operators", name) == ["ok"] * ranks
