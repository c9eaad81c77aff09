"""Real engines: for every model and topology, greedy tokens equal those of one stock vLLM engine.

Tokens are compared, not logits, so the comparison is worth something only where the best token is clear: each test
also checks that the smallest margin is far above the difference that another order of summation makes.
What this does not prove: speed, accelerators, multi-node.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cpu.conftest import WAVES, make_requests, on_ranks
from vllm_ascend_moe.integration.generate import EngineSpec, Generated, Request, generate
from vllm_ascend_moe.tools.trace import LayerStep, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

# How many times the noise the smallest margin must be.
_CLEAR = 10


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

    def __str__(self) -> str:
        compiled = "" if self.eager else "-compiled"
        packed = "-packed" if self.packed else ""
        experts = "" if self.experts == "auto" else f"-{self.experts}"
        return f"{self.model}-dp{self.dp}-tp{self.tp}-ep{self.dp * self.tp}{compiled}{packed}{experts}"

    def section(self) -> dict[str, object]:
        packing = {} if self.packed else {"packed_bytes": 0}
        return {"ascend_moe": {"experts": self.experts, **packing}}


CASES = [
    Case("qwen3_moe", dp=2, group="dp"),
    Case("qwen3_moe", tp=2, group=None),
    Case("qwen3_moe", dp=2, tp=2, packed=True),
    Case("qwen3_moe", dp=3, group="dp"),
    Case("qwen3_moe", dp=2, group="dp", eager=False),
    Case("deepseek_v3", dp=2, group="dp"),
    Case("deepseek_v3", tp=2, group=None),
    Case("deepseek_v3", dp=2, tp=2),
    Case("deepseek_v3", dp=2, tp=2, eager=False, packed=True),
    Case("mixtral", dp=2, group="dp", packed=True),
    Case("mixtral", dp=2, tp=2, group="dp"),
    # vLLM's own CPU kernel, which alone would crash under expert parallelism: its ids are made local.
    Case("mixtral", dp=2, group="dp", packed=True, experts="vllm"),
]


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
    """Every MoE layer of every step went through the padded layout over the right group, also on idle ranks."""
    assert {step.group for step in steps} == {case.group}
    if case.group is None:
        return
    ranks = case.dp if case.group == "dp" else case.dp * case.tp
    assert {len(step.local_sizes or ()) for step in steps} == {ranks}
    assert {step.rank for step in steps} == set(range(ranks))
    gathers = 1 if case.packed else 3  # hidden states, ids, weights
    assert {tuple(kind for kind, _ in step.collectives) for step in steps} == {
        ("gather",) * gathers + ("reduce_scatter",)
    }
    assert any(len(set(step.local_sizes or ())) > 1 for step in steps), "no step was uneven: the test proves too little"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_equal_one_stock_engine(
    case: Case,
    tmp_path: Path,
    model_path: Callable[[str, str], str],
    single_engine: Callable[[str, str], list[Generated]],
) -> None:
    single = single_engine(case.model, "float32")
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
    )
    check_tokens(single, generate(spec, timeout_s=360))
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
