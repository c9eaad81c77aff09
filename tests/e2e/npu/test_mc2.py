"""Fused dispatch and combine (npu_moe_distribute_*) on 2 and 4 NPUs, against dense experts in fp64.

On the soft NPU it proves the arguments and the meaning of the operators as documented, not their kernels; Atlas A2
documents them for 16 ranks and more.
"""

from __future__ import annotations

from functools import cache

import npu_ranks
import pytest
import torch
from exchange_cases import Case

from vllm_ascend_moe.testing.data import Routing
from vllm_ascend_moe.testing.launch import launch

BF16, FP16 = {"hidden_size": 64, "dtype": torch.bfloat16}, {"hidden_size": 32, "dtype": torch.float16}
CASES = {
    "uneven": Case((3, 7), **BF16),
    "an idle rank": Case((0, 5), top_k=3, id_dtype=torch.int64, **FP16),
    "nobody has a token": Case((0, 0), **BF16),
    "unrouted choices, NaN weights": Case((9, 4), top_k=3, invalid_share=0.4, seed=5, **BF16),
    "round robin, 1 and 33 tokens": Case((1, 33), top_k=4, placement="round_robin", seed=6, **FP16),
    "all to one expert": Case((5, 0, 2, 9), routing=Routing.ONE_EXPERT, **BF16),
    "one expert a rank": Case((1, 2, 0, 3), num_experts=4, placement=(3, 1, 0, 2), seed=7, **BF16),
    "nowhere": Case((2, 1, 3, 1), routing=Routing.NOWHERE, **FP16),
    "skewed": Case((12, 3, 8, 5), num_experts=16, top_k=6, routing=Routing.SKEWED, seed=8, **BF16),
}


def cases_of(ranks: int) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if len(case.sizes) == ranks}


@cache
def reports(ranks: int) -> list[dict[str, str]]:
    return launch(ranks, npu_ranks.run_mc2, cases_of(ranks), backend="hccl")


@pytest.mark.parametrize("payload", ["16 bits", "int8"])
@pytest.mark.parametrize(
    ("ranks", "name"),
    [pytest.param(ranks, name, id=f"R={ranks}, {name}") for ranks in (2, 4) for name in cases_of(ranks)],
    indirect=["ranks"],
)
def test_dense_answer(ranks, name, payload):
    assert [report[f"{name}, {payload}"] for report in reports(ranks)] == ["ok"] * ranks
