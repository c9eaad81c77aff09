"""mc2 as the configuration makes it: a communicator of its own, its payload, groups with a part of the experts.

On the soft NPU it proves arguments and meaning of the operators, not their kernels.
"""

from __future__ import annotations

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
