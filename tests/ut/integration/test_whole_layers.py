"""Whole MoE layers with every strategy on four ranks (DP=2 x TP=2), against a dense computation: exactly one reduction,
sequence parallel or not, whatever the payload, the bound of a pass, the placement and the token counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ut.integration.layer_world import LayerCase, Outcome, run_differing, run_layers
from vllm_ascend_moe.testing.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

PADDED, ROWS, BATCHED, UNEVEN = "padded_allgather", "all_to_all", "batched_all_to_all", "uneven_allgather"
STRATEGIES = (PADDED, ROWS, BATCHED, UNEVEN)
RANKS = 4


def _sp(sp: bool) -> str:
    return "sp" if sp else "tp"


# With shared experts and a routed scaling factor: an output that is reduced twice, or not at all, is far off.
PLAIN = [
    LayerCase(f"{comm}-{_sp(sp)}", {"comm": comm}, sp=sp, shared=True) for comm in STRATEGIES for sp in (True, False)
]
VARIANTS = [
    *(LayerCase(f"auto-{_sp(sp)}", {"comm": "auto"}, sp=sp) for sp in (True, False)),
    *(
        LayerCase(f"{comm}-weight-on-input", {"comm": comm}, sp=False, weight_on_input=True, experts=2)
        for comm in STRATEGIES
    ),
    *(
        LayerCase(f"{comm}-round-robin", {"comm": comm}, sp=comm is ROWS, round_robin=True, experts=6)
        for comm in STRATEGIES
    ),
    LayerCase("all_to_all-vllm-kernel", {"comm": ROWS, "experts": "vllm"}, sp=False),
    LayerCase("rows-over-capacity", {"comm": BATCHED, "max_tokens_across_dp": 3, "over_capacity": "rows"}),
]
BF16 = [LayerCase(f"{comm}-bf16", {"comm": comm}, dtype=torch.bfloat16) for comm in STRATEGIES]
# int8: half a step of 1/127 of a token's largest element; fp8: 3 bits of mantissa.
QUANTIZED = [
    LayerCase(f"{comm}-{payload}", {"comm": comm, "quantize_dispatch": payload})
    for comm, payload in ((PADDED, "int8"), (ROWS, "int8"), (BATCHED, "int8"), (ROWS, "fp8"), (BATCHED, "fp8"))
]
EXACT = [LayerCase(f"{comm}-exact", {"comm": comm, "exact": True, "experts": "torch"}) for comm in STRATEGIES]
# Native kernels compute a row alike whatever the others are, so that passes can be compared bit by bit.
WHOLE = [LayerCase(f"{comm}-whole", {"comm": comm, "exact": True, "experts": "native"}) for comm in STRATEGIES]
CHUNKED = [
    replace(case, name=f"{case.section['comm']}-chunked", section={**case.section, "max_tokens_in_flight": 3})
    for case in WHOLE
]
# Rows that the token counts of the forward do not cover: in one pass, in several, with a strategy of any kind.
WRONG_ROWS = [
    LayerCase(
        f"{comm}-{bound}-{more}-rows", {"comm": comm, "max_tokens_in_flight": bound}, sizes=((5, 4),), more_rows=more
    )
    for comm in (PADDED, ROWS)
    for bound in (None, 2)
    for more in (1, -1)
]
TOO_MANY = ((5, 2), (1, 40), (3, 3))
ERRORS = [
    (
        LayerCase("over-capacity", {"comm": BATCHED, "max_tokens_across_dp": 19}, sizes=TOO_MANY),
        ["CapacityError", "= 20, but it must be at most capacity = 19"],
    ),
    (
        LayerCase("over-default-capacity", {"comm": BATCHED}, sizes=((1, 66),)),
        # max_num_batched_tokens of 64, spread over TP=2.
        ["CapacityError", "= 33, but it must be at most capacity = 32"],
    ),
    (
        LayerCase("without-expert-parallelism", {"comm": ROWS}, sp=False, expert_parallel=False),
        ["UnsupportedError", "--enable-expert-parallel"],
    ),
    (LayerCase("mc2-on-a-cpu", {"comm": "mc2"}), ["ConfigError", "comm = 'mc2'", "devices of type cpu", "over HCCL"]),
    *((case, ["LayoutError: x.shape[0] = ", "but it must be local_size = "]) for case in WRONG_ROWS),
]
CASES = [*PLAIN, *VARIANTS, *BF16, *QUANTIZED, *EXACT, *WHOLE, *CHUNKED, *(case for case, _ in ERRORS)]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """By case, what each rank saw."""
    ranks = launch(RANKS, run_layers, CASES, timeout_s=180)
    return {case.name: [rank[case.name] for rank in ranks] for case in CASES}


def check(case: LayerCase, ranks: list[Outcome], tolerance: float) -> None:
    assert [outcome.error for outcome in ranks] == [""] * RANKS
    assert max(outcome.worst for outcome in ranks) < tolerance
    assert any(output.numel() for outcome in ranks for output in outcome.outputs)
    assert {outcome.placement for outcome in ranks} == {"round_robin" if case.round_robin else "linear"}
    strategies = {tuple(outcome.strategies) for outcome in ranks}
    assert len(strategies) == 1, "ranks chose differently"
    if case.section["comm"] not in ("auto", BATCHED):
        assert set(*strategies) == {case.section["comm"]}


@pytest.mark.parametrize("case", [*PLAIN, *VARIANTS], ids=str)
def test_equals_a_dense_layer(case: LayerCase, outcomes: dict[str, list[Outcome]]) -> None:
    check(case, outcomes[case.name], 3e-6)


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16(case: LayerCase, outcomes: dict[str, list[Outcome]]) -> None:
    check(case, outcomes[case.name], 2e-2)


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_quantised_dispatch(case: LayerCase, outcomes: dict[str, list[Outcome]]) -> None:
    check(case, outcomes[case.name], 4e-2 if "int8" in case.name else 1e-1)
    # It did travel rounded.
    assert max(outcome.worst for outcome in outcomes[case.name]) > 1e-4


def test_over_capacity_falls_back_to_rows_in_that_forward_alone(outcomes: dict[str, list[Outcome]]) -> None:
    # (5, 2), (1, 0), (0, 0), (1, 40), (3, 3) on two TP ranks each: only 40 tokens are more than 3 a rank.
    assert outcomes["rows-over-capacity"][0].strategies == [BATCHED, BATCHED, BATCHED, ROWS, BATCHED]


def check_same_bits(one: list[Outcome], two: list[Outcome]) -> None:
    for ours, theirs in zip(one, two, strict=True):
        for x, y in zip(ours.outputs, theirs.outputs, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_exact_mode_has_the_same_bits_with_every_strategy(case: LayerCase, outcomes: dict[str, list[Outcome]]) -> None:
    check(case, outcomes[case.name], 3e-6)
    check_same_bits(outcomes[case.name], outcomes[EXACT[0].name])


@pytest.mark.parametrize(("whole", "chunked"), list(zip(WHOLE, CHUNKED, strict=True)), ids=str)
def test_passes_change_no_bit_and_are_bounded(
    whole: LayerCase, chunked: LayerCase, outcomes: dict[str, list[Outcome]]
) -> None:
    check(chunked, outcomes[chunked.name], 3e-6)
    check_same_bits(outcomes[whole.name], outcomes[chunked.name])
    # At most 3 tokens a rank: 3, 1, 0, 20 and 2 tokens on the fullest one take 1, 1, 1, 7 and 1 passes.
    assert len(outcomes[chunked.name][0].strategies) == 11


@pytest.mark.parametrize(("case", "parts"), ERRORS, ids=[case.name for case, _ in ERRORS])
def test_refused_on_every_rank(case: LayerCase, parts: list[str], outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes[case.name]:
        for part in parts:
            assert part in outcome.error


def test_a_configuration_that_cannot_work_on_one_rank_stops_all() -> None:
    """Rank 2 finds its error alone, before ranks compare theirs."""
    sections = [{"comm": "mc2" if rank == 2 else "auto"} for rank in range(RANKS)]
    errors = launch(RANKS, run_differing, sections, timeout_s=180)  # ranks import vLLM in it
    assert errors[2].startswith("ConfigError: comm = 'mc2', but it must be another strategy")
    for rank in (0, 1, 3):
        assert errors[rank].startswith("ConfigError: errors by rank = {2: "), errors[rank]
