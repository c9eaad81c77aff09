"""mc2 as the configuration makes it: a communicator of its own, its payload, groups with a part of the experts.

On the soft NPU it proves arguments and meaning of the operators, not their kernels.
"""

from __future__ import annotations

import os

import fused_ranks
import pytest
import torch
from exchange_cases import Case

from vllm_ascend_moe.testing.launch import launch

CASE = Case((9, 4), top_k=3, hidden_size=64, invalid_share=0.3, dtype=torch.bfloat16, seed=3)


@pytest.mark.parametrize("payload", ["none", "int8"])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_made_from_the_configuration_it_gives_the_dense_answer_over_one_group_of_its_own(ranks, payload):
    assert launch(ranks, fused_ranks.made, CASE, payload, backend="hccl") == [(True, True)] * ranks


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_in_a_group_with_a_part_of_the_experts_choices_of_others_add_nothing(ranks):
    launch(ranks, fused_ranks.part_of_the_experts, CASE, backend="hccl")


@pytest.mark.skipif(os.environ.get("ASCEND_MOE_SOFTNPU") != "1", reason="what ends the wait on hardware is not known")
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_rank_that_refuses_its_inputs_leaves_the_others_waiting_until_the_backend_gives_up(ranks, monkeypatch):
    """The soft NPU gives up when its time is over; it does not show what an NPU does."""
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "4")
    waited, refused = launch(ranks, fused_ranks.refusals, CASE, backend="hccl")
    assert [text.split(":")[0] for text in refused] == ["DtypeError", "DtypeError", "ShapeError"]
    for step, text in zip(("prepare", "dispatch", "combine"), waited, strict=True):
        assert text.startswith(f"CommError: mc2: {step} failed")
        assert "no answer within 4 s" in text
