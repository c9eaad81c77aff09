"""vLLM's experts step on top of our expert kernels."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import (
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEExpertsModular,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    MoEActivation,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata, TopKWeightAndReduce
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.experts.activation import ACTIVATIONS
from vllm_ascend_moe.experts.base import ExpertWeights, RowsExperts
from vllm_ascend_moe.experts.native import NativeExperts, pack_weights

# The constants of gpt-oss, which our swigluoai activations implement; None stands for vLLM's default, the same.
_SWIGLUOAI_PARAMETERS = {"swiglu_limit": (None, 7.0), "swiglu_alpha": (None, 1.702), "swiglu_beta": (None, 1.0)}
_NO_PARAMETERS = dict.fromkeys(_SWIGLUOAI_PARAMETERS, (None,))
# vLLM keeps each of them in two places; the quantisation configuration's comes first.
_IN_QUANT_CONFIG = {"swiglu_limit": "gemm1_clamp_limit", "swiglu_alpha": "gemm1_alpha", "swiglu_beta": "gemm1_beta"}


def check_layer(moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
    """Refuses at start what our kernels would otherwise compute differently.

    Raises:
        UnsupportedError: an activation, activation parameters or LoRA that we do not implement.
    """
    name = moe_config.activation.value
    if name not in ACTIVATIONS:
        raise UnsupportedError(
            f"activation = {name!r} is not implemented; there are {', '.join(ACTIVATIONS)}. "
            "Set ASCEND_MOE_ENABLE=0 to run this model on stock vLLM."
        )
    allowed = _SWIGLUOAI_PARAMETERS if name.startswith("swigluoai") else _NO_PARAMETERS
    for parameter, values in allowed.items():
        value = getattr(quant_config, _IN_QUANT_CONFIG[parameter])
        if value is None:
            value = getattr(moe_config, parameter, None)
        if value not in values:
            raise UnsupportedError(
                f"{parameter} = {value!r} with activation {name!r} is not implemented; it must be one of {values}. "
                "Set ASCEND_MOE_ENABLE=0 to run this model on stock vLLM."
            )
    if moe_config.is_lora_enabled:
        raise UnsupportedError("LoRA on routed experts is not implemented. Serve without --enable-lora.")


class RowsExpertsStep(FusedMoEExpertsModular):
    """Any :class:`RowsExperts` kernel as vLLM's experts step: expert maps, pad rows and ids of -1 are honoured."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, kernel: RowsExperts) -> None:
        check_layer(moe_config, quant_config)
        super().__init__(moe_config, quant_config)
        self.kernel = kernel
        self._weights_type = ExpertWeights

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Repacks the layer's weights in place where the kernel reads them faster so. vLLM calls this again when it
        has written new weights."""
        w13, w2 = layer.get_parameter("w13_weight").data, layer.get_parameter("w2_weight").data
        weights = ExpertWeights(w13=w13, w2=w2, w13_bias=self.w1_bias, w2_bias=self.w2_bias)
        if isinstance(self.kernel, NativeExperts):
            self._weights_type = type(pack_weights(weights))

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

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
            self._weights_type(w13=w1, w2=w2, w13_bias=self.w1_bias, w2_bias=self.w2_bias),
            expert_map=expert_map,
            activation=activation.value,
            apply_router_weight_on_input=apply_router_weight_on_input,
            out=output,
        )
