"""Padded and uneven all-gather, all-to-all by row and batched, each with each payload, on R = 2, 3, 4 and 8 processes.

Proves that in exact mode all give the same bits, those of the sum in the order of ranks and expert slots; that as the
engine runs them they are within the dtype's bound of experts without communication; that a quantised payload costs no
more than its bound, element by element, and half the bytes out; whatever the counts, routing, ids, placement and dtype,
with NaN wherever nothing may be read. Does not prove NCCL or HCCL, nor the fast experts.
"""

from __future__ import annotations

from functools import cache

import exchange_cases
import exchange_checks
import pytest
import torch
from exchange_cases import Case

from vllm_ascend_moe.comm.cost_model import STRATEGIES, MoEShape, cost_of
from vllm_ascend_moe.comm.links import LINKS
from vllm_ascend_moe.testing.data import Routing
from vllm_ascend_moe.testing.launch import launch

pytestmark = pytest.mark.multiprocess

# mc2 runs on NPUs alone: tests/e2e/npu.
NAMES = [name for name in STRATEGIES if name != "mc2"]

# More ranks say the same more slowly on a small machine.
DRAWN = {2: 36, 3: 18, 4: 12, 8: 8}

# What was reported in public of this kind of software, as the smallest case; V vllm, VA vllm-ascend, SG sglang.
NAMED = {
    "V #46408: -1 is no expert, a token of -1 alone is a zero row": Case(
        (1, 1), num_experts=4, ids=((0, -1), (-1, -1))
    ),
    "V #48371: ids past the last expert and far below": Case(
        (2, 2), num_experts=4, ids=((4, 3), (-7, 0), (1004, 9), (-1, 2))
    ),
    "VA #16384: 5 experts on 2 ranks": Case((3, 2), num_experts=5),
    "V #21497: 7 experts on 3 ranks": Case((3, 2, 1), num_experts=7, top_k=3),
    "V #52435: 30 experts on 8 ranks": Case((3, 2, 1, 0, 4, 2, 1, 3), num_experts=30, top_k=4),
    "V #52435, round-robin": Case((3, 2, 1, 0, 4, 2, 1, 3), num_experts=30, top_k=4, placement="round_robin"),
    "more ranks than experts": Case((2, 3, 1, 2), num_experts=3),
    "all experts on the last rank": Case((3, 2, 1), num_experts=4, placement=(2, 2, 2, 2)),
    "VA #8864: a replica of each of two experts": Case((3, 3), num_experts=6, placement=(0, 0, 1, 1, 1, 0)),
    "V #43547: one request, the other rank idle": Case((1, 0)),
    "VA #2582: the idle rank is the first": Case((0, 1)),
    "nobody has a token": Case((0, 0, 0)),
    "V #27209: one request of 8 tokens": Case((8, 0), num_experts=16, top_k=8),
    "VA #7297: 1 and 64 tokens": Case((1, 64)),
    "SG #23246: exactly at capacity": Case((5, 5), slack=0),
    "V #19515: far below capacity": Case((1, 2), num_experts=4, slack=9),
    "VA #6710: reduced once": Case((1, 1), num_experts=2, ids=((0, 1), (1, 0))),
    "V #20166: int64 ids": Case((2, 3), id_dtype=torch.int64),
    "V #31055: bf16 tokens keep fp32 weights": Case((3, 1), dtype=torch.bfloat16, top_k=4),
    "VA #3420: int8, each row with its own scale": Case((1, 3), payload="int8"),
    "VA #13414: fp8, each row with its own scale": Case((1, 3), payload="fp8"),
    "all tokens to one expert": Case((4, 9, 2), routing=Routing.ONE_EXPERT),
    "an expert twice": Case((4, 2), num_experts=4, top_k=3, twice=True),
}


def cases_of(ranks: int) -> dict[str, Case]:
    drawn = {f"drawn {case.seed}": case for case in exchange_cases.draw(ranks, DRAWN[ranks])}
    return drawn | {name: case for name, case in NAMED.items() if len(case.sizes) == ranks}


@cache
def reports(ranks: int) -> list[tuple[dict[str, str], dict]]:
    """One launch per R serves all its tests."""
    return launch(ranks, exchange_checks.run_all, cases_of(ranks), timeout_s=120)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [pytest.param(ranks, name, id=f"R={ranks}, {name}") for ranks in DRAWN for name in cases_of(ranks)],
)
def test_every_strategy_gives_the_same_answer(ranks, name):
    assert [report[name] for report, _ in reports(ranks)] == ["ok"] * ranks


@pytest.mark.parametrize("ranks", DRAWN, ids=lambda ranks: f"R={ranks}")
@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_payload_halves_the_bytes_out_as_counted(ranks, name):
    """150 tokens a rank of 1024 bf16 elements, top-6 of 64: bytes handed to the collectives."""
    for _, found in reports(ranks):
        out, back, calls = found[name, None]
        for payload in ("int8", "fp8"):
            less, same, as_many = found[name, payload]
            assert 0.5 < less / out < 0.53
            assert (same, as_many) == (back, calls)


@pytest.mark.parametrize("ranks", DRAWN, ids=lambda ranks: f"R={ranks}")
@pytest.mark.parametrize("payload", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_the_cost_model_counts_what_the_collectives_are_given(ranks, name, payload):
    """Up to 16 bytes of alignment a tensor; of all-to-all by row the mean of all ranks, since routing is random."""
    shape = MoEShape(hidden_size=1024, num_experts=64, top_k=6, payload=payload or "none")
    cost = cost_of(name, (150,) * ranks, shape, LINKS["gloo"], 150, True)
    counted = [found[name, payload] for _, found in reports(ranks)]
    exchange_of_counts = (ranks - 1) * 8 if name == "all_to_all" else 0
    out = sum(c[0] for c in counted) / ranks - exchange_of_counts
    back = sum(c[1] for c in counted) / ranks
    slack = 0.03 if name == "all_to_all" else 0
    assert out == pytest.approx(cost.dispatch_bytes, rel=slack + 0.03)
    assert back == pytest.approx(cost.combine_bytes, rel=slack + 1e-9)
    assert {c[2] for c in counted} == {cost.collectives}


def test_cases_are_the_same_on_every_rank_and_cover_what_they_should():
    """Drawing twice gives the same list; each choice of each field is among the cases."""
    cases = [case for ranks in DRAWN for case in exchange_cases.draw(ranks, DRAWN[ranks])]
    assert cases == [case for ranks in DRAWN for case in exchange_cases.draw(ranks, DRAWN[ranks])]
    for payload in (None, "int8", "fp8"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert any((case.payload, case.dtype) == (payload, dtype) for case in cases)
    assert {case.routing for case in cases} == set(Routing)
    assert {type(case.placement) for case in cases} == {str, tuple}
    assert {case.id_dtype for case in cases} == {torch.int32, torch.int64}
    assert any(case.twice for case in cases)
    assert any(0 in case.sizes and max(case.sizes) > 3 for case in cases)
    assert any(max(case.sizes) == 0 for case in cases)
    assert any(min(case.placed().local_counts) == 0 for case in cases)
