"""vLLM's FusedMoEKernel for each strategy of a layer: a prepare/finalize step with the experts step of its format."""

from __future__ import annotations

from functools import cached_property

from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalizeModular,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.platforms import current_platform

from vllm_ascend_moe.comm.cost_model import Strategy
from vllm_ascend_moe.comm.select import Situation
from vllm_ascend_moe.config import AscendMoEConfig
from vllm_ascend_moe.experts.select import make_batched_experts, make_rows_experts
from vllm_ascend_moe.integration.experts import BatchedExpertsStep, RowsExpertsStep
from vllm_ascend_moe.integration.local_ids import LocalIdsPrepareFinalize
from vllm_ascend_moe.integration.placement import group_of
from vllm_ascend_moe.integration.prepare_finalize import (
    CommPrepareFinalize,
    LocalPrepareFinalize,
    PaddedPrepareFinalize,
)
from vllm_ascend_moe.integration.strategies import buffers_of, make_comm
from vllm_ascend_moe.ops.forward_layouts import GroupName
from vllm_ascend_moe.placement import ExpertPlacement


class KernelBuilder:
    """Builds the kernels of one layer; kernels of one format share their experts step, and so its weights."""

    def __init__(self, moe: FusedMoEConfig, quant_config: FusedMoEQuantConfig, config: AscendMoEConfig) -> None:
        self.moe = moe
        self.quant_config = quant_config
        self.config = config

    def local(self) -> FusedMoEKernel:
        """The kernel of a layer that does not communicate."""
        return self._with_rows(LocalPrepareFinalize())

    def communicating(
        self, strategy: Strategy, name: GroupName, situation: Situation, placement: ExpertPlacement | None
    ) -> FusedMoEKernel:
        """The kernel of one strategy over one group; only padded_allgather needs no placement."""
        group = group_of(name)
        plain = self.config.quantize_dispatch == "none" and not self.config.exact
        if strategy == "padded_allgather" and plain:
            return self._with_rows(PaddedPrepareFinalize(group.world_size, situation.packed_bytes))
        comm = make_comm(strategy, group, placement, situation, self.config, buffers_of(name))
        if strategy != "batched_all_to_all":
            return self._with_rows(CommPrepareFinalize(comm, group.world_size))
        assert situation.capacity is not None, "select refuses batched_all_to_all without one"
        step = BatchedExpertsStep(
            self.moe,
            self.quant_config,
            make_batched_experts(self.config.experts, current_platform.device_type),
            max_num_tokens=situation.capacity,
            num_dispatchers=group.world_size,
        )
        return FusedMoEKernel(CommPrepareFinalize(comm, group.world_size, situation.capacity), step)

    def _with_rows(self, prepare_finalize: FusedMoEPrepareAndFinalizeModular) -> FusedMoEKernel:
        if self.config.experts == "vllm":
            prepare_finalize = LocalIdsPrepareFinalize(prepare_finalize, self.moe.num_local_experts)
        return FusedMoEKernel(prepare_finalize, self._rows_step)

    @cached_property
    def _rows_step(self) -> FusedMoEExpertsModular:
        if self.config.experts != "vllm":
            kernel = make_rows_experts(self.config.experts, current_platform.device_type)
            return RowsExpertsStep(self.moe, self.quant_config, kernel)
        _, experts_cls = select_unquantized_moe_backend(self.moe)
        assert experts_cls is not None, "vLLM has kernels of its own for every platform we subclass"
        experts = experts_cls(self.moe, self.quant_config)
        assert isinstance(experts, FusedMoEExpertsModular), "on CPU they are modular from vLLM 0.30 on"
        return experts
