"""Shapes and types of the MoE operators' results, as torch_npu's own host code infers them."""

import pytest
import torch

from vllm_ascend_moe.softnpu.contract import contract

T, H, E, K = 5, 8, 4, 2
X = torch.randn(T, H, dtype=torch.bfloat16).npu()
IDS = torch.randint(0, E, (T, K), dtype=torch.int32).npu()
ROWS = torch.randn(T * K, H, dtype=torch.bfloat16).npu()
POSITIONS = torch.randperm(T * K).to(torch.int32).npu()
WEIGHTS = torch.rand(T, K, dtype=torch.bfloat16).npu()
COUNTS = torch.tensor([3, 0, 5, 2]).npu()
RANGE = {"expert_num": E, "expert_tokens_num_flag": True, "active_expert_range": [1, 3]}
INT8 = torch.randint(-9, 9, (E, H, 6), dtype=torch.int8).npu()
SCALES = {"scale": [torch.rand(E, 6).npu()], "per_token_scale": [torch.rand(T * K).npu()]}
GROUPS = {"group_list": COUNTS, "split_item": 2, "group_type": 0, "group_list_type": 1}

CALLS = {
    "init_routing": ("npu_moe_init_routing", X, IDS, IDS.clone(), 3),
    "init_routing_v2": ("npu_moe_init_routing_v2", X, IDS, {**RANGE, "active_num": 7, "expert_tokens_num_type": 1}),
    "init_routing_v2, pairs": ("npu_moe_init_routing_v2", X, IDS, {**RANGE, "expert_tokens_num_type": 2}),
    "init_routing_v2, int8": ("npu_moe_init_routing_v2", X, IDS, {**RANGE, "quant_mode": 1}),
    "gating_top_k": ("npu_moe_gating_top_k", X, K, {"norm_type": 1}),
    "gating_top_k_softmax": ("npu_moe_gating_top_k_softmax", X, None, K),
    "gating_top_k_softmax_v2": ("npu_moe_gating_top_k_softmax_v2", X, {"k": K, "output_softmax": True}),
    "token_permute": ("npu_moe_token_permute", X, IDS, 7),
    "token_unpermute": ("npu_moe_token_unpermute", ROWS, POSITIONS, WEIGHTS),
    "finalize_routing": ("npu_moe_finalize_routing", ROWS, None, None, None, WEIGHTS, POSITIONS, None, 2),
    "re_routing": ("npu_moe_re_routing", ROWS, COUNTS.view(2, 2)),
    "grouped_matmul": ("npu_grouped_matmul", [ROWS], [torch.randn(E, H, 6).bfloat16().npu()], GROUPS),
    "grouped_matmul, int8": (
        "npu_grouped_matmul",
        [ROWS.char()],
        [INT8],
        {**GROUPS, **SCALES, "output_dtype": torch.bfloat16},
    ),
    "swiglu": ("npu_swiglu", X),
    "dynamic_quant": ("npu_dynamic_quant", X),
    "dynamic_quant_asymmetric": ("npu_dynamic_quant_asymmetric", X),
}


@pytest.mark.parametrize("name", CALLS)
def test_contract(name):
    operator, *arguments = CALLS[name]
    keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
    contract(f"npu::{operator}", *arguments, **keywords)
