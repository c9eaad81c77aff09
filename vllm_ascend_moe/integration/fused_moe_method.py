"""The unquantised MoE method: vLLM's FusedMoEKernel made of our prepare/finalize and experts steps."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEParallelConfig, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from vllm_ascend_moe.config import parse_config
from vllm_ascend_moe.errors import LayoutError, UnsupportedError
from vllm_ascend_moe.integration.agreement import check_agreement, told_to_others
from vllm_ascend_moe.integration.experts import RowsExpertsStep, process_weights
from vllm_ascend_moe.integration.forward_state import communication_group, current_layouts
from vllm_ascend_moe.integration.kernels import KernelBuilder
from vllm_ascend_moe.integration.passes import Pass, PassPlanner, planner
from vllm_ascend_moe.integration.placement import group_of, placement_in_group
from vllm_ascend_moe.integration.strategies import describe, make_situation, must_agree, possible_strategies
from vllm_ascend_moe.ops.forward_layouts import ForwardLayouts, GroupName
from vllm_ascend_moe.platform import logger


class AscendMoEUnquantizedMethod(UnquantizedFusedMoEMethod):
    """Replaces vLLM's method of the same name. Weights are created by vLLM's code; applying them is ours.

    A layer that communicates has one kernel for each strategy it may use; each forward's token counts decide.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        # Not UnquantizedFusedMoEMethod.__init__: it selects a stock kernel, and refuses the sizes that kernel lacks.
        super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.CPU, RowsExpertsStep
        self.supports_pre_processed_weights = True
        self.vllm_config = get_current_vllm_config()
        self.config = parse_config(self.vllm_config.additional_config)
        self.group: GroupName | None = None
        self._kernels: dict[str, FusedMoEKernel] = {}
        self._planner: PassPlanner | None = None

    @property
    def is_monolithic(self) -> bool:
        return False

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """No rounding: vLLM rounds for the kernels that --all2all-backend names, which are not used here."""
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Builds the kernels at the first call; takes the weights at every call (vLLM calls again after an update).

        Raises:
            UnsupportedError, ConfigError, PlacementError: a layer or a configuration that cannot work, found at start.
        """
        if self.moe_kernel is None:
            self._kernels = self._build(layer)
            # vLLM asks one of them for what all kernels of a layer answer alike.
            self.moe_kernel = next(iter(self._kernels.values()))
        process_weights([kernel.fused_experts for kernel in self._kernels.values()], layer)

    def _build(self, layer: Any) -> dict[str, FusedMoEKernel]:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        builder = KernelBuilder(self.moe, self.moe_quant_config, self.config)
        self.group = communication_group(self.moe.moe_parallel_config, get_tp_group().world_size)
        if self.group is None:
            return {"local": builder.local()}
        if self.vllm_config.parallel_config.use_ubatching:
            raise UnsupportedError(
                "Dual-batch overlap is not supported: layers share the buffers of dispatch. Serve without --enable-dbo."
            )
        group, placement = group_of(self.group), None
        with told_to_others(group.cpu_group):
            situation = make_situation(self.moe, self.vllm_config, self.group, self.config)
            strategies = possible_strategies(situation, group.world_size)
            if not {*strategies} <= {"padded_allgather", "uneven_allgather"}:
                placement = placement_in_group(layer.expert_map, self.moe.num_experts, self.group)
        if check_agreement(group.cpu_group, must_agree(self.config, situation, placement)):
            logger.info("%s", describe(situation, group.world_size))
        self._planner = planner(situation, self.config.max_tokens_in_flight)
        return {each: builder.communicating(each, self.group, situation, placement) for each in strategies}

    def forward_native(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """The routed experts' output [T_r, H], of all passes. The runner computes shared experts.

        Raises:
            LayoutError: ``x`` does not have the rows that the ranks agreed on for this forward.
        """
        if self._planner is None:
            return super().forward_native(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        layouts = current_layouts()
        with layouts.use(self.group):
            layout = layouts.layout()
        if x.shape[0] != layout.local_size:
            # Rows past the last pass would come back as they were allotted, and missing ones leave others waiting.
            raise LayoutError(
                "x.shape[0]",
                x.shape[0],
                f"local_size = {layout.local_size} of rank {layout.rank}, from the token counts of this forward",
                "Run the layer on the tokens that set_forward_context was told of.",
            )
        passes = self._planner.passes(layout)
        if len(passes) == 1:
            return self._run(passes[0], layouts, layer, x, topk_weights, topk_ids)
        output = torch.empty_like(x)
        for each in passes:
            rows = each.rows
            output[rows] = self._run(each, layouts, layer, x[rows], topk_weights[rows], topk_ids[rows])
        return output

    def _run(
        self,
        each: Pass,
        layouts: ForwardLayouts,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        with layouts.use(self.group, each.layout):
            layouts.passes.append(each.strategy)
            output = self._kernels[each.strategy].apply(
                hidden_states=x,
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
            )
        assert isinstance(output, torch.Tensor), "our steps leave nothing to a later consumer"
        return output
