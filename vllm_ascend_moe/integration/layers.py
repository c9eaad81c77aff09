"""Out-of-tree registration of our layers. Done only where our platform runs."""

from __future__ import annotations

import logging

from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.integration.fused_moe_method import AscendMoEUnquantizedMethod
from vllm_ascend_moe.integration.runner import AscendMoERunner


def register_layers() -> None:
    """Replaces vLLM's unquantised MoE method and its MoE runner by ours. Harmless when called again.

    Raises:
        UnsupportedError: another plugin has replaced one of them already.
    """
    _log_where_vllm_does()
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


def _log_where_vllm_does() -> None:
    """comm/ says why a strategy was chosen, but knows no vLLM, which shows only what its own loggers get."""
    ours, vllm = logging.getLogger("vllm_ascend_moe"), logging.getLogger("vllm")
    ours.setLevel(vllm.getEffectiveLevel())
    for handler in vllm.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
