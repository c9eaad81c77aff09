"""Real engines: for every model and topology, greedy tokens equal those of one stock vLLM engine.

Tokens are compared, not logits, so the comparison is worth something only where the best token is clear: each test
also checks that the smallest margin is far above the difference that another order of summation makes.
What this does not prove: speed, accelerators, multi-node.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.cpu.conftest import PROMPT_LENGTHS, WAVES, make_burst, make_requests, on_ranks
from vllm_ascend_moe.integration.generate import EngineSpec, Generated, Request, generate
from vllm_ascend_moe.tools.trace import LayerStep, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# How many times the noise the smallest margin must be.
_CLEAR = 10

PADDED, ROWS, BATCHED, UNEVEN = "padded_allgather", "all_to_all", "batched_all_to_all", "uneven_allgather"
# vLLM keeps the placement only beside a backend's name that has one; on a CPU the name selects nothing else.
ROUND_ROBIN = {"expert_placement_strategy": "round_robin", "all2all_backend": "deepep_low_latency"}


@dataclass(frozen=True)
class Case:
    """One model on one topology."""

    model: str
    dp: int = 1
    tp: int = 1
    eager: bool = True
    group: str | None = "ep"  # the group its MoE layers must communicate over
    packed: bool = False  # one packed gather a layer, or one operator call for each tensor
    experts: str = "auto"
    comm: str = PADDED
    more: dict[str, object] = field(default_factory=dict)  # of the configuration section
    engine_args: dict[str, str] = field(default_factory=dict)
    used: frozenset[str] = frozenset()  # strategies that must have been used; empty: comm alone
    long: bool = False  # left to `make test-all`: other cases and the tests of whole layers cover most of it

    def __str__(self) -> str:
        names = ["" if self.eager else "compiled", "packed" if self.packed else ""]
        names += [name for name in (self.experts, self.comm) if name not in ("auto", PADDED)]
        names += [f"{key}={value}" for key, value in self.more.items()]
        names += [self.engine_args["expert_placement_strategy"]] if self.engine_args else []
        return "-".join([self.model, f"dp{self.dp}-tp{self.tp}-ep{self.dp * self.tp}", *filter(None, names)])

    def section(self) -> dict[str, object]:
        packing = {} if self.packed else {"packed_bytes": 0}
        return {"ascend_moe": {"comm": self.comm, "experts": self.experts, **packing, **self.more}}


CASES = [
    Case("qwen3_moe", dp=2, group="dp", long=True),
    Case("qwen3_moe", tp=2, group=None, long=True),
    Case("qwen3_moe", dp=2, tp=2, packed=True, long=True),
    Case("qwen3_moe", dp=3, group="dp", long=True),
    Case("qwen3_moe", dp=2, group="dp", eager=False, long=True),
    Case("deepseek_v3", dp=2, group="dp", long=True),
    Case("deepseek_v3", tp=2, group=None, long=True),
    Case("deepseek_v3", dp=2, tp=2, long=True),
    Case("deepseek_v3", dp=2, tp=2, eager=False, packed=True),
    Case("mixtral", dp=2, tp=2, group="dp", long=True),
    # vLLM's own CPU kernel, which alone would crash under expert parallelism: its ids are made local.
    Case("mixtral", dp=2, group="dp", packed=True, experts="vllm", long=True),
    # All-to-all by row: SP (compiled, in passes), TP without SP.
    Case("deepseek_v3", dp=2, tp=2, eager=False, comm=ROWS, more={"max_tokens_in_flight": 48}),
    Case("mixtral", dp=2, tp=2, group="dp", comm=ROWS, long=True),
    # Batched: in passes; where a long prompt is more than its capacity; compiled.
    Case("deepseek_v3", dp=2, group="dp", comm=BATCHED, more={"max_tokens_in_flight": 48}, long=True),
    Case(
        "qwen3_moe",
        dp=2,
        tp=2,
        comm=BATCHED,
        more={"max_tokens_across_dp": 32, "over_capacity": "rows"},
        used=frozenset({BATCHED, ROWS}),
    ),
    Case("mixtral", dp=2, tp=2, group="dp", eager=False, comm=BATCHED, long=True),
    Case("deepseek_v2", dp=2, group="dp", comm="auto", packed=True, used=frozenset({PADDED}), long=True),
    # The rest of every model with every strategy on DP=2 and on DP=2 x TP=2.
    Case("mixtral", dp=2, group="dp", long=True),
    Case("qwen3_moe", dp=2, group="dp", comm=ROWS, long=True),
    Case("qwen3_moe", dp=2, tp=2, comm=ROWS, long=True),
    Case("deepseek_v3", dp=2, group="dp", comm=ROWS, engine_args=ROUND_ROBIN, long=True),
    Case("mixtral", dp=2, group="dp", comm=ROWS, long=True),
    Case("qwen3_moe", dp=2, group="dp", comm=BATCHED, long=True),
    Case("deepseek_v3", dp=2, tp=2, comm=BATCHED, engine_args=ROUND_ROBIN, long=True),
    Case("mixtral", dp=2, group="dp", comm=BATCHED, long=True),
    Case("qwen3_moe", dp=2, group="dp", comm=UNEVEN, long=True),
    Case("deepseek_v3", dp=2, tp=2, comm=UNEVEN, long=True),
]
# Collectives of one pass of each strategy.
_OF_A_PASS = {
    ROWS: ("all_to_all",) * 3,  # row counts, rows, sums back
    BATCHED: ("gather", "all_to_all"),
    UNEVEN: ("all_to_all",) * 4,  # over gloo: hidden states, ids, weights; sums back
}


def check_tokens(single: list[Generated], shared: list[Generated]) -> None:
    """Same tokens, and none of them a close call."""
    assert [result.tokens for result in shared] == [result.tokens for result in single]
    pairs = [
        (one, two) for s, d in zip(single, shared, strict=True) for one, two in zip(s.margins, d.margins, strict=True)
    ]
    noise = max(abs(one - two) for one, two in pairs)
    margin = min(one for one, _ in pairs)
    assert margin > _CLEAR * noise, f"smallest margin {margin} is not clear of the noise {noise}: choose other prompts"


def check_trace(steps: list[LayerStep], case: Case) -> None:
    """Every MoE layer of every step used the strategy over the right group, also on idle ranks."""
    assert {step.group for step in steps} == {case.group}
    if case.group is None:
        return
    ranks = case.dp if case.group == "dp" else case.dp * case.tp
    assert {len(step.local_sizes or ()) for step in steps} == {ranks}
    assert {step.rank for step in steps} == set(range(ranks))
    padded = ("gather",) * (1 if case.packed else 3) + ("reduce_scatter",)  # hidden states, ids, weights
    for step in steps:
        expected = [kind for strategy in step.strategies for kind in (_OF_A_PASS | {PADDED: padded})[strategy]]
        assert [kind for kind, _ in step.collectives] == expected
    assert {strategy for step in steps for strategy in step.strategies} == (case.used or {case.comm})
    check_layers_agree(steps)
    most = 200 if case.group == "dp" else 200 // case.tp
    # With TP a step of one token is run as one of two; sequence parallelism shares them out.
    fewest = 2 if case.group == "dp" and case.tp > 1 else 1
    uneven = [step for step in steps if {fewest, most} <= set(step.local_sizes or ())]
    assert uneven, "no step had 1 and 200 tokens on two ranks: the test proves too little"
    bound = case.more.get("max_tokens_in_flight")
    assert {len(step.strategies) for step in uneven} == {1 if bound is None else -(-most // bound)}


def check_layers_agree(steps: list[LayerStep]) -> None:
    """Every rank ran every layer equally often, with the same strategies in the same order."""
    by_rank: dict[tuple[str, int | None], list[tuple[str, ...]]] = {}
    for step in steps:
        by_rank.setdefault((step.layer, step.rank), []).append(step.strategies)
    for layer, rank in by_rank:
        # Under "dp" without SP, TP ranks write lines of the same rank: sorted, they compare all the same.
        assert sorted(by_rank[layer, rank]) == sorted(by_rank[layer, 0])


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.long] * case.long) for case in CASES]
)
def test_tokens_equal_one_stock_engine(
    case: Case,
    tmp_path: Path,
    model_path: Callable[[str, str], str],
    single_engine: Callable[[str, str], list[Generated]],
) -> None:
    single = single_engine(case.model, "float32")[: len(PROMPT_LENGTHS)]
    spec = EngineSpec(
        model_path(case.model, "float32"),
        on_ranks(make_requests(0), case.dp),
        tp=case.tp,
        dp=case.dp,
        expert_parallel=True,
        enforce_eager=case.eager,
        waves=WAVES,
        env={"ASCEND_MOE_TRACE": str(tmp_path)},
        additional_config=case.section(),
        engine_args=dict(case.engine_args),
    )
    check_tokens(single, generate(spec, timeout_s=480))
    check_trace(read_trace(tmp_path), case)


def test_bf16(model_path: Callable[[str, str], str]) -> None:
    """The dtype models are served in. Another order of summation moves bf16 logits by about 0.05 here, so only prompts
    are compared whose every token is clear by 0.3 in the single engine; enough of them must be."""
    rng = random.Random(1)
    requests = [Request([rng.randrange(256) for _ in range(1 + i % 9)], 3, dp_rank=i % 2) for i in range(32)]
    model = model_path("qwen3_moe", "bfloat16")
    single = generate(EngineSpec(model, requests, stock=True, dtype="bfloat16"))
    shared = generate(EngineSpec(model, requests, dp=2, expert_parallel=True, dtype="bfloat16"))
    clear = [i for i, result in enumerate(single) if min(result.margins) > 0.3]
    assert len(clear) >= 8
    assert {i: shared[i].tokens for i in clear} == {i: single[i].tokens for i in clear}


def _first_tokens_of_burst(model: str, comm: str, payload: str) -> list[Generated]:
    """What two engines with quantised dispatch generate first for each request of the burst."""
    section = {"comm": comm, "quantize_dispatch": payload}
    requests = on_ranks([Request(request.prompt, 1) for request in make_burst()], 2)
    spec = EngineSpec(model, requests, dp=2, expert_parallel=True, additional_config={"ascend_moe": section})
    return generate(spec, timeout_s=480)


def _moved(single: list[Generated], shared: list[Generated]) -> list[float]:
    return [abs(one.margins[0] - two.margins[0]) for one, two in zip(single, shared, strict=True)]


def test_int8_dispatch(
    model_path: Callable[[str, str], str], single_engine: Callable[[str, str], list[Generated]]
) -> None:
    """Tokens travel rounded, which moves logits; so only first tokens that are clear by far are compared."""
    single = single_engine("qwen3_moe", "float32")[len(PROMPT_LENGTHS) :]
    shared = _first_tokens_of_burst(model_path("qwen3_moe", "float32"), ROWS, "int8")
    limit = 0.5
    clear = [i for i, result in enumerate(single) if result.margins[0] > limit]
    assert len(clear) >= 8
    assert [shared[i].tokens[0] for i in clear] == [single[i].tokens[0] for i in clear]
    assert 1e-4 < max(_moved(single, shared)) < limit, "rounding must show, and be far below the margin"


@pytest.mark.long
def test_fp8_dispatch(
    model_path: Callable[[str, str], str], single_engine: Callable[[str, str], list[Generated]]
) -> None:
    """e4m3 has three bits of mantissa: it moves a margin of this model by 1, with every strategy alike, so the single
    engine is no measure for it. Two strategies are: padded all-gather widens tokens on arrival, batched experts get
    bytes and scales. The error of the payload itself is bounded in tests/ut/comm."""
    model = model_path("qwen3_moe", "float32")
    padded, batched = (_first_tokens_of_burst(model, comm, "fp8") for comm in (PADDED, BATCHED))
    single = single_engine("qwen3_moe", "float32")[len(PROMPT_LENGTHS) :]
    assert max(_moved(single, padded)) > 1e-2, "rounding must show"
    noise = max(_moved(padded, batched))
    assert noise < 1e-4
    clear = [i for i, result in enumerate(padded) if result.margins[0] > _CLEAR * noise]
    assert len(clear) > len(padded) // 2
    assert [batched[i].tokens for i in clear] == [padded[i].tokens for i in clear]
