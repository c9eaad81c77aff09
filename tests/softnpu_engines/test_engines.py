"""Unmodified vllm-ascend engines on the soft NPU, with its own operators and with ours: the same greedy tokens, and
those of a stock vLLM engine on the CPU wherever the best token is clear.

What this does not prove: speed, the NPU's own rounding, streams and their order, graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.softnpu_engines.engine import read_counts, run_vllm_ascend
from vllm_ascend_moe.integration.generate import Generated

pytestmark = pytest.mark.timeout(3600)

# Another order of summation moves bf16 logits by about 0.05 here. A token is compared with the CPU's only where the
# CPU's best one is ahead by more than this, and only up to the first that is not: what follows has another past.
_CLEAR = 0.2
_LEAST_COMPARED = 20


@dataclass(frozen=True)
class Case:
    """One model on one topology."""

    model: str
    dp: int
    tp: int
    sequence_parallel: bool = False

    def __str__(self) -> str:
        return f"{self.model}-dp{self.dp}-tp{self.tp}{'-sp' if self.sequence_parallel else ''}"

    def run(self, model: str, *, ours: bool, counts: Path) -> list[Generated]:
        counts.mkdir()
        return run_vllm_ascend(
            model, dp=self.dp, tp=self.tp, ours=ours, sequence_parallel=self.sequence_parallel, counts=counts
        )


def check_clear_tokens(stock: list[Generated], npu: list[Generated]) -> None:
    """Every token equals the CPU's, up to the first unclear one of its request."""
    compared = 0
    for index, (one, other) in enumerate(zip(stock, npu, strict=True)):
        clear = next((i for i, margin in enumerate(one.margins) if margin <= _CLEAR), len(one.margins))
        assert other.tokens[:clear] == one.tokens[:clear], f"request {index}"
        compared += clear
    assert compared >= _LEAST_COMPARED, f"only {compared} tokens are clear: choose other prompts"


def check_steps(rows: list[dict[str, Any]], case: Case) -> None:
    """Every rank took part in the gathered path."""
    assert {row["rank"] for row in rows} == set(range(case.dp * case.tp))
    assert {row["comm"] for row in rows} == {"ALLGATHER"}
    assert {row["sequence_parallel"] for row in rows} == {case.sequence_parallel}
    if not case.sequence_parallel:
        assert any(len(set(row["counts"])) > 1 for row in rows), "no step was uneven: the test proves too little"


def check_layers(rows: list[dict[str, Any]], *, ours: bool) -> None:
    """vllm-ascend copies the rows of each DP rank, in every gather and in the reduction. Ours submits collectives, and
    for uneven steps one launch for ids and one, where this rank has pad rows, for them."""
    uneven = 0
    for row in rows:
        assert (row["prepare"]["collectives"], row["finalize"]["collectives"]) == (2, 1)
        moved = row["prepare"]["by_name"], row["finalize"]["by_name"]
        fills = row["experts"]["by_name"].get("aten::masked_fill_.Scalar", 0)
        if not ours:
            ranks = len(row["counts"])
            assert (moved, fills) == (({"aclnnInplaceCopy": 2 * ranks}, {"aclnnInplaceCopy": ranks}), 0)
            continue
        tokens = row["tokens"]
        pads = {"aten::zero_": 1} if tokens[row["rank"]] < max(tokens) else {}
        assert (moved, fills) == (({}, pads), int(len(set(tokens)) > 1))
        uneven += fills
    assert uneven or not ours, "no step was uneven: the test proves too little"


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3_moe", dp=2, tp=2, sequence_parallel=True),
        Case("deepseek_v3", dp=2, tp=2, sequence_parallel=True),
        Case("qwen3_moe", dp=2, tp=1),
        Case("deepseek_v3", dp=2, tp=1),
    ],
    ids=str,
)
def test_same_tokens_with_our_operators_and_on_the_cpu(
    case: Case, tmp_path: Path, model_path: Callable[[str], str], stock_cpu: Callable[[str], list[Generated]]
) -> None:
    model = model_path(case.model)
    results = {}
    for name, ours in (("theirs", False), ("ours", True)):
        results[name] = case.run(model, ours=ours, counts=tmp_path / name)
        rows = read_counts(tmp_path / name)
        check_steps(rows, case)
        if case.sequence_parallel:
            check_layers(rows, ours=ours)
    assert [result.tokens for result in results["ours"]] == [result.tokens for result in results["theirs"]]
    for name in results:
        check_clear_tokens(stock_cpu(case.model), results[name])
