"""vLLM's own CPU experts under expert parallelism.

They ignore the expert map: global ids are used as indices into this rank's weights, which reads and writes out of
bounds (a segmentation fault on vLLM 0.32). Between dispatch and experts, ids are therefore turned into local ones;
whatever is not routed to this rank becomes local expert 0 with weight 0. That costs time and, for finite values, adds
exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEKernelModularImpl,
    FusedMoEPrepareAndFinalizeModular,
    PrepareResultType,
    TopKWeightAndReduce,
)

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.experts.reference import local_slots


class LocalIdsPrepareFinalize(FusedMoEPrepareAndFinalizeModular):
    """Another prepare/finalize step, whose dispatched ids are made local to this rank.

    Args:
        inner: the step that communicates.
        num_local_experts: E_l.
    """

    def __init__(self, inner: FusedMoEPrepareAndFinalizeModular, num_local_experts: int) -> None:
        super().__init__()
        self.inner = inner
        self.num_local_experts = num_local_experts

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return self.inner.activation_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        return self.inner.topk_indices_dtype()

    def max_num_tokens_per_rank(self) -> int | None:
        return self.inner.max_num_tokens_per_rank()

    def num_dispatchers(self) -> int:
        return self.inner.num_dispatchers()

    def output_is_reduced(self) -> bool:
        return self.inner.output_is_reduced()

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        hidden, scale, meta, ids, weights = self.inner.prepare(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant=defer_input_quant,
        )
        ids, weights = topk_ids if ids is None else ids, topk_weights if weights is None else weights
        slots = local_slots(ids, expert_map, self.num_local_experts)
        here = slots >= 0
        if apply_router_weight_on_input:
            # The weights were used up on the input, so they cannot silence a choice: the input row must.
            hidden = hidden * here.any(dim=1, keepdim=True).to(hidden.dtype)
        local_ids = slots.clamp(min=0).to(ids.dtype).contiguous()
        return _dense(hidden), scale, meta, local_ids, torch.where(here, weights, 0).contiguous()

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        self.inner.finalize(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` [n, H], rows right behind each other. Packed dispatch gives strided views, which those kernels misread or
    refuse; and a view of one row calls itself contiguous, whatever its stride."""
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)


def make_ids_local(method: FusedMoEMethodBase, layer_name: str, num_local_experts: int) -> None:
    """Puts :class:`LocalIdsPrepareFinalize` into a vLLM method that runs under expert parallelism.

    Raises:
        UnsupportedError: the method has no modular kernel, so its ids cannot be reached before its experts.
    """
    impl: Any = None if method.moe_kernel is None else method.moe_kernel.impl
    if not isinstance(impl, FusedMoEKernelModularImpl):
        raise UnsupportedError(
            f"{layer_name}: {type(method).__name__} ignores the expert map on CPU and has no modular kernel, so it "
            "would read other ranks' experts out of bounds. Serve this model without --enable-expert-parallel."
        )
    if not isinstance(impl.prepare_finalize, LocalIdsPrepareFinalize):
        impl.prepare_finalize = LocalIdsPrepareFinalize(impl.prepare_finalize, num_local_experts)
