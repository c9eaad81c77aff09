"""Real engines: for every model and topology, greedy tokens equal those of one stock vLLM engine.

Tokens are compared, not logits, so the comparison is worth something only where the best token is clear: each test
also checks that the smallest margin is far above the difference that another order of summation makes.
What this does not prove: speed, accelerators, multi-node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.cpu.conftest import WAVES, make_requests, on_ranks
from vllm_ascend_moe.integration.generate import EngineSpec, Generated, generate
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
    dtype: str = "float32"
    engine_args: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        compiled = "" if self.eager else "-compiled"
        dtype = "" if self.dtype == "float32" else f"-{self.dtype}"
        extra = "".join(f"-{key}={value}" for key, value in self.engine_args.items())
        return f"{self.model}-dp{self.dp}-tp{self.tp}-ep{self.dp * self.tp}{compiled}{dtype}{extra}"


CASES = [
    Case("qwen3_moe", dp=2, group="dp"),
    Case("qwen3_moe", tp=2, group=None),
    Case("qwen3_moe", dp=2, tp=2),
    Case("qwen3_moe", dp=3, group="dp"),
    Case("qwen3_moe", dp=2, group="dp", eager=False),
    Case("deepseek_v3", dp=2, group="dp"),
    Case("deepseek_v3", tp=2, group=None),
    Case("deepseek_v3", dp=2, tp=2),
    Case("deepseek_v3", dp=2, tp=2, eager=False),
    Case("mixtral", dp=2, group="dp"),
    Case("mixtral", dp=2, tp=2, group="dp"),
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
    assert {tuple(name for name, _ in step.collectives) for step in steps} == {
        ("gather", "gather", "gather", "reduce_scatter")
    }
    assert any(len(set(step.local_sizes or ())) > 1 for step in steps), "no step was uneven: the test proves too little"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_equal_one_stock_engine(
    case: Case,
    tmp_path: Path,
    model_path: Callable[[str, str], str],
    single_engine: Callable[[str, str], list[Generated]],
) -> None:
    single = single_engine(case.model, case.dtype)
    spec = EngineSpec(
        model_path(case.model, case.dtype),
        on_ranks(make_requests(0), case.dp),
        tp=case.tp,
        dp=case.dp,
        expert_parallel=True,
        enforce_eager=case.eager,
        dtype=case.dtype,
        waves=WAVES,
        env={"ASCEND_MOE_TRACE": str(tmp_path)},
        engine_args=case.engine_args,
    )
    check_tokens(single, generate(spec, timeout_s=360))
    check_trace(read_trace(tmp_path), case)
