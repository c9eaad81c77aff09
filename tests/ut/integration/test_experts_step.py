"""What our experts step accepts and refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.model_executor.layers.fused_moe import MoEActivation

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.integration.layer_check import check_layer

_PARAMETERS = {"swiglu_limit": "gemm1_clamp_limit", "swiglu_alpha": "gemm1_alpha", "swiglu_beta": "gemm1_beta"}


def check(activation: MoEActivation, *, lora: bool = False, in_quant_config: bool = False, **given: float) -> None:
    """Hand-made stand-ins with the fields the check reads; a real layer is built by every engine test."""
    moe = {name: None if in_quant_config else given.get(name) for name in _PARAMETERS}
    quant = {field: given.get(name) if in_quant_config else None for name, field in _PARAMETERS.items()}
    layer = SimpleNamespace(activation=activation, is_lora_enabled=lora, **moe)
    check_layer(layer, SimpleNamespace(**quant))


@pytest.mark.parametrize(
    "activation", [MoEActivation.SILU, MoEActivation.GELU, MoEActivation.RELU2_NO_MUL, MoEActivation.SWIGLUOAI], ids=str
)
def test_accepts(activation: MoEActivation) -> None:
    check(activation)


def test_accepts_the_published_parameters_of_swigluoai() -> None:
    check(MoEActivation.SWIGLUOAI, swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=7.0)


def test_refuses_an_activation_it_does_not_implement() -> None:
    with pytest.raises(UnsupportedError, match="activation = 'situ' is not implemented; there are silu"):
        check(MoEActivation.SITU)


@pytest.mark.parametrize("in_quant_config", [False, True], ids=["layer", "quant-config"])
@pytest.mark.parametrize("parameters", [{"swiglu_limit": 10.0}, {"swiglu_alpha": 2.0}], ids=str)
def test_refuses_parameters_it_would_ignore(parameters: dict[str, float], in_quant_config: bool) -> None:
    [name] = parameters
    with pytest.raises(UnsupportedError, match=f"{name} = "):
        check(MoEActivation.SILU, in_quant_config=in_quant_config, **parameters)


def test_refuses_lora() -> None:
    with pytest.raises(UnsupportedError, match="LoRA"):
        check(MoEActivation.SILU, lora=True)
