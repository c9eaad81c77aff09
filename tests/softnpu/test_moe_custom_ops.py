"""vllm-ascend's `_C_ascend::` MoE operators: the same results as torch_npu's, whatever the order of the arguments."""

import pytest
import torch
import torch_npu

SCHEMAS = {
    "npu_moe_init_routing_custom": "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
    "bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "moe_gating_top_k": "(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, "
    "int norm_type, bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None) "
    "-> (Tensor y, Tensor expert_idx, Tensor out)",
}


@pytest.fixture(scope="module")
def ops():
    """As vllm-ascend defines them, after the soft NPU has registered their kernels."""
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    yield torch.ops._C_ascend
    library._destroy()


@pytest.mark.parametrize("bounds", [[], [1, 3]])
def test_init_routing(ops, bounds):
    x, ids = torch.randn(5, 8).npu(), torch.randint(0, 4, (5, 2), dtype=torch.int32).npu()
    arguments = {"active_num": 10, "expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    arguments |= {"quant_mode": 1, "row_idx_type": 1}
    given = ops.npu_moe_init_routing_custom(x, ids, active_expert_range=bounds, **arguments)
    wanted = torch_npu.npu_moe_init_routing_v2(x, ids, active_expert_range=bounds or [0, 4], **arguments)
    for g, w in zip(given, wanted, strict=True):
        torch.testing.assert_close(g.cpu(), w.cpu(), equal_nan=True, rtol=0, atol=0)


def test_gating(ops):
    x, bias = torch.randn(5, 16).npu(), torch.randn(16).npu()
    given = ops.moe_gating_top_k(x, 3, 2, 4, 1, 0, 1, True, 2.5, 1e-20, bias)
    wanted = torch_npu.npu_moe_gating_top_k(
        x,
        3,
        bias=bias,
        k_group=2,
        group_count=4,
        group_select_mode=1,
        renorm=0,
        norm_type=1,
        out_flag=True,
        routed_scaling_factor=2.5,
        eps=1e-20,
    )
    for g, w in zip(given, wanted, strict=True):
        assert torch.equal(g.cpu(), w.cpu())
