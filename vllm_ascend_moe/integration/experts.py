"""vLLM's experts step on top of our expert kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.model_executor.layers.fused_moe import (
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEExpertsModular,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    MoEActivation,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEExperts,
    TopKWeightAndReduce,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from vllm_ascend_moe.experts.activation import ACTIVATIONS
from vllm_ascend_moe.experts.base import BatchedExperts, ExpertWeights, RowsExperts
from vllm_ascend_moe.experts.native import NativeExperts, pack_weights
from vllm_ascend_moe.integration.layer_check import check_layer


class _ExpertsStep(FusedMoEExpertsModular):
    """What the steps of both formats share."""

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        kernel: RowsExperts | BatchedExperts,
        *,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        check_layer(moe_config, quant_config)
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.kernel = kernel
        self._weights_type = ExpertWeights

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Repacks the layer's weights in place where the kernel reads them faster so. vLLM calls this again when it
        has written new weights."""
        w13, w2 = layer.get_parameter("w13_weight").data, layer.get_parameter("w2_weight").data
        weights = ExpertWeights(w13=w13, w2=w2, w13_bias=self.w1_bias, w2_bias=self.w2_bias)
        if isinstance(self.kernel, NativeExperts):
            self._weights_type = type(pack_weights(weights))

    def share_weights_of(self, other: _ExpertsStep) -> None:
        """Reads the weights as ``other``, which has processed them, left them."""
        self._weights_type = other._weights_type

    def _weights(self, w1: torch.Tensor, w2: torch.Tensor) -> ExpertWeights:
        return self._weights_type(w13=w1, w2=w2, w13_bias=self.w1_bias, w2_bias=self.w2_bias)

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True


class RowsExpertsStep(_ExpertsStep):
    """Any :class:`RowsExperts` kernel as vLLM's experts step: expert maps, pad rows and ids of -1 are honoured."""

    kernel: RowsExperts

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace of vLLM's; the output is [rows, H]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """output [rows, H] = the weighted sum of each row's local experts; every row is written."""
        self.kernel.apply(
            hidden_states,
            topk_weights,
            topk_ids,
            self._weights(w1, w2),
            expert_map=expert_map,
            activation=activation.value,
            apply_router_weight_on_input=apply_router_weight_on_input,
            out=output,
        )


class BatchedExpertsStep(_ExpertsStep):
    """Any :class:`BatchedExperts` kernel as vLLM's experts step: outputs are unweighted, expert by expert."""

    kernel: BatchedExperts

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace of vLLM's; the output is [E_l, C*R, H]."""
        return (0,), (0,), (local_num_experts, M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """output [E_l, C*R, H] = each expert's outputs for its rows; rows past its count keep what they held."""
        counts = None if expert_tokens_meta is None else expert_tokens_meta.expert_num_tokens
        assert counts is not None, "batched dispatch counts the rows of each expert"
        self.kernel.apply_batched(
            hidden_states,
            counts,
            self._weights(w1, w2),
            activation=activation.value,
            scales=a1q_scale,
            out=output,
        )


def process_weights(steps: Sequence[FusedMoEExperts], layer: torch.nn.Module) -> None:
    """Processes a layer's weights in place, once, and tells all steps that read them."""
    first, *others = steps
    first.process_weights_after_loading(layer)
    for step in others:
        if step is not first:
            assert isinstance(first, _ExpertsStep), "a step of vLLM's own is the only one of its layer"
            assert isinstance(step, _ExpertsStep), "a step of vLLM's own is the only one of its layer"
            step.share_weights_of(first)
