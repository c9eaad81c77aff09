"""Inputs and strategies of the all-to-all by row, for its tests on all ranks in one process."""

import torch

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data


def inputs(layout, top_k=2, num_experts=4, dtype=torch.float32, hidden_size=4):
    tokens = data.token_ids(layout, layout.rank)
    return {
        "hidden": data.hidden_states(0, tokens, hidden_size, dtype),
        "topk_weights": data.topk_weights(0, tokens, top_k),
        "topk_ids": data.topk_ids(0, tokens, top_k, num_experts),
        "num_experts": num_experts,
        "layout": layout,
    }


def linear(group, num_experts=4, **options):
    return AllToAll(group, ExpertPlacement.linear(num_experts, group.world_size), **options)
