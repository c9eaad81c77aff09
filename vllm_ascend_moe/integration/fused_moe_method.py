"""The unquantised MoE method: vLLM's FusedMoEKernel made of our prepare/finalize and experts steps."""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalizeModular,
    FusedMoEQuantConfig,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    select_unquantized_moe_backend,
)
from vllm.platforms import current_platform

from vllm_ascend_moe.comm.padded_all_gather import DEFAULT_PACKED_BYTES
from vllm_ascend_moe.config import parse_config
from vllm_ascend_moe.experts.select import make_rows_experts
from vllm_ascend_moe.integration.experts import RowsExpertsStep
from vllm_ascend_moe.integration.forward_state import communication_group
from vllm_ascend_moe.integration.local_ids import LocalIdsPrepareFinalize
from vllm_ascend_moe.integration.prepare_finalize import LocalPrepareFinalize, PaddedPrepareFinalize


class AscendMoEUnquantizedMethod(UnquantizedFusedMoEMethod):
    """Replaces vLLM's method of the same name. Weights are created by vLLM's code; applying them is ours."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        # Not UnquantizedFusedMoEMethod.__init__: it selects a stock kernel, and refuses the sizes that kernel lacks.
        super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.CPU, RowsExpertsStep
        self.supports_pre_processed_weights = True
        self.config = parse_config(get_current_vllm_config().additional_config)

    @property
    def is_monolithic(self) -> bool:
        return False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Builds the kernel at the first call; takes the weights at every call (vLLM calls again after an update)."""
        if self.moe_kernel is None:
            self.moe_kernel = self._build_kernel(layer)
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def _build_kernel(self, layer: torch.nn.Module) -> FusedMoEKernel:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize, experts = self._prepare_finalize(), self._experts(self.moe_quant_config)
        if self.config.experts == "vllm":
            prepare_finalize = LocalIdsPrepareFinalize(prepare_finalize, self.moe.num_local_experts)
        return FusedMoEKernel(prepare_finalize, experts)

    def _prepare_finalize(self) -> FusedMoEPrepareAndFinalizeModular:
        parallel = self.moe.moe_parallel_config
        group = communication_group(parallel, get_tp_group().world_size)
        if group is None:
            return LocalPrepareFinalize()
        packed = DEFAULT_PACKED_BYTES if self.config.packed_bytes is None else self.config.packed_bytes
        return PaddedPrepareFinalize(group, parallel.dp_size, packed)

    def _experts(self, quant_config: FusedMoEQuantConfig) -> FusedMoEExpertsModular:
        if self.config.experts != "vllm":
            kernel = make_rows_experts(self.config.experts, current_platform.device_type)
            return RowsExpertsStep(self.moe, quant_config, kernel)
        _, experts_cls = select_unquantized_moe_backend(self.moe)
        assert experts_cls is not None, "vLLM has kernels of its own for every platform we subclass"
        experts = experts_cls(self.moe, quant_config)
        assert isinstance(experts, FusedMoEExpertsModular), "on CPU they are modular from vLLM 0.30 on"
        return experts
