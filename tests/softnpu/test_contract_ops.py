"""Shapes and types of what norms, rotary, attention and sampling return, as torch_npu's own host code infers them.

test_moe_contract.py has the MoE operators; test_moe_distribute.py those that communicate.
"""

import pytest
import torch

from vllm_ascend_moe.softnpu.contract import contract

BF16 = torch.bfloat16
X, GAMMA = torch.randn(3, 16).to(BF16).npu(), torch.ones(16, dtype=BF16).npu()
HEADS = torch.randn(4, 2, 16).to(BF16).npu()
ANGLES = torch.randn(2, 1, 3, 16).to(BF16).npu()
PARTS = [torch.rand(6).npu()] * 2, [torch.rand(6, 16).to(BF16).npu()] * 2
BATCH = torch.rand(3, 5, 7).to(BF16).npu(), torch.rand(3, 7, 4).to(BF16).npu()
PACKED = {"input_layout": "TND", "actual_seq_lengths": [3, 4], "actual_seq_lengths_kv": [3, 4]}
PACKED_V2 = {"input_layout": "TND", "actual_seq_qlen": [3, 4], "actual_seq_kvlen": [3, 4]}
KV = (
    torch.randn(2, 1, 3, 64).to(BF16).npu(),
    torch.randn(48).to(BF16).npu(),
    ANGLES,
    ANGLES,
    torch.arange(6).npu(),
    torch.zeros(3, 4, 1, 16).to(BF16).npu(),
    torch.zeros(3, 4, 1, 48).to(BF16).npu(),
)

CALLS = {
    "rms_norm": ("npu_rms_norm", X, GAMMA),
    "rms_norm, fp32 gamma": ("npu_rms_norm", X, GAMMA.float()),
    "add_rms_norm": ("npu_add_rms_norm", X, X, GAMMA),
    "gemma_rms_norm": ("npu_gemma_rms_norm", X, GAMMA),
    "interleave_rope": ("npu_interleave_rope", ANGLES.expand(2, 4, 3, 16).contiguous(), ANGLES, ANGLES),
    "kv_rmsnorm_rope_cache": ("npu_kv_rmsnorm_rope_cache", *KV, {"cache_mode": "PA"}),
    "kv_rmsnorm_rope_cache, kv": ("npu_kv_rmsnorm_rope_cache", *KV, {"cache_mode": "PA", "is_output_kv": True}),
    "attention_update": ("npu_attention_update", *PARTS, 0),
    "attention_update, lse": ("npu_attention_update", *PARTS, 1),
    "transpose_batchmatmul": ("npu_transpose_batchmatmul", *BATCH, {"perm_y": [1, 0, 2]}),
    "top_k_top_p": ("npu_top_k_top_p", X, {"k": torch.tensor([1, 2, 3], dtype=torch.int32).npu()}),
    "attention": ("npu_fused_infer_attention_score", *[HEADS] * 3, {**PACKED, "num_heads": 2}),
    "attention, lse": (
        "npu_fused_infer_attention_score",
        *[HEADS] * 3,
        {**PACKED, "num_heads": 2, "softmax_lse_flag": True},
    ),
    "attention_v2, lse": (
        "npu_fused_infer_attention_score_v2",
        *[HEADS] * 3,
        {**PACKED_V2, "num_query_heads": 2, "return_softmax_lse": True},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_contract(name):
    operator, *arguments = CALLS[name]
    keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
    contract(f"npu::{operator}", *arguments, **keywords)
