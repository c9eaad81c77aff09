"""vllm-ascend's own MoE operators: the same kernels as torch_npu's, under other names and argument orders."""

from __future__ import annotations

import torch

from vllm_ascend_moe.softnpu.overrides.emulate import compose

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _init_routing_custom(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: tuple[int, ...] = (),
    row_idx_type: int = 0,
) -> Four:
    result: Four = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        expert_idx,
        scale=scale,
        offset=offset,
        active_num=active_num,
        expert_capacity=expert_capacity,
        expert_num=expert_num,
        drop_pad_mode=drop_pad_mode,
        expert_tokens_num_type=expert_tokens_num_type,
        expert_tokens_num_flag=expert_tokens_num_flag,
        quant_mode=quant_mode,
        active_expert_range=list(active_expert_range) or [0, expert_num],
        row_idx_type=row_idx_type,
    )
    return result


def _gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> Three:
    result: Three = torch.ops.npu.npu_moe_gating_top_k(
        x,
        k,
        bias=bias_opt,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        renorm=renorm,
        norm_type=norm_type,
        out_flag=out_flag,
        routed_scaling_factor=routed_scaling_factor,
        eps=eps,
    )
    return result


def install() -> None:
    """Registers the kernels; vllm-ascend may define the operators later."""
    compose("_C_ascend::npu_moe_init_routing_custom", _init_routing_custom)
    compose("_C_ascend::moe_gating_top_k", _gating_top_k)
