"""Out-of-tree registration of our layers. Done only where our platform runs."""

from __future__ import annotations

from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.integration.fused_moe_method import AscendMoEUnquantizedMethod
from vllm_ascend_moe.integration.runner import AscendMoERunner


def register_layers() -> None:
    """Replaces vLLM's unquantised MoE method and its MoE runner by ours. Harmless when called again.

    Raises:
        UnsupportedError: another plugin has replaced one of them already.
    """
    for registry, name, layer in (
        (CustomOp, "UnquantizedFusedMoEMethod", AscendMoEUnquantizedMethod),
        (PluggableLayer, "MoERunner", AscendMoERunner),
    ):
        present = op_registry_oot.get(name)
        if present is layer:
            continue
        if present is not None:
            raise UnsupportedError(
                f"Another plugin ({present.__module__}) has replaced vLLM's {name}. Choose one with VLLM_PLUGINS, "
                "or set ASCEND_MOE_ENABLE=0."
            )
        registry.register_oot(layer, name=name)
