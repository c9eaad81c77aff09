"""Refuses layers that our expert kernels would compute differently."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEQuantConfig

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.experts.activation import ACTIVATIONS

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
