"""vLLM's MoE runner, made to compile on CPU and told which token layout each layer uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from vllm_ascend_moe.integration.forward_state import communication_group
from vllm_ascend_moe.integration.fused_moe_method import AscendMoEUnquantizedMethod
from vllm_ascend_moe.integration.local_ids import make_ids_local
from vllm_ascend_moe.integration.trace import traced_layer
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY


class AscendMoERunner(MoERunner):
    """Runs the layer inside vLLM's opaque operator, with this forward's layout selected for tracing.

    On CPU stock vLLM lets Dynamo trace into the layer. It traces once and never guards, so token counts of the first
    step (and ``.tolist()`` of them, which cannot be traced) would end up in the graph. The opaque operator is what
    every other platform uses.
    """

    _checked_expert_map = False

    def _select_forward(self) -> Callable:
        if self._shared_experts is None:
            return torch.ops.vllm.moe_forward
        return torch.ops.vllm.moe_forward_shared

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Before the first step, makes sure that the method honours the expert map."""
        if not self._checked_expert_map:
            method = self.routed_experts.quant_method
            if self.moe_config.moe_parallel_config.use_ep and not isinstance(method, AscendMoEUnquantizedMethod):
                make_ids_local(method, self.layer_name, self.routed_experts.local_num_experts)
            self._checked_expert_map = True
        return super()._forward_impl(*args, **kwargs)

    @contextmanager
    def _sequence_parallel_context(self) -> Iterator[None]:
        """Selects the layer's layout; keeps vLLM's own sizes too, for methods that use its collectives."""
        layouts = get_forward_context().additional_kwargs.get(FORWARD_LAYOUTS_KEY)
        if layouts is None:
            with super()._sequence_parallel_context(), traced_layer(self.layer_name, None):
                yield
            return
        group = communication_group(self.moe_config.moe_parallel_config, get_tp_group().world_size)
        with super()._sequence_parallel_context(), layouts.use(group), traced_layer(self.layer_name, layouts):
            yield
