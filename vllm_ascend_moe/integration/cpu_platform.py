"""Our platform on CPU hosts: vLLM's own CPU platform plus expert parallelism that works.

The class keeps ``_enum = CPU``: with ``OOT`` vLLM would route to kernels no CPU build has. This module is imported
while vLLM is partly initialised, so it imports nothing of vLLM but the platform classes at module level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.zen_cpu import ZenCpuPlatform

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.platform import logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

WORKER = "vllm_ascend_moe.integration.cpu_worker.AscendMoECPUWorker"


class AscendMoEPlatformMixin:
    """What every platform class of ours adds to the host's."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The communicator with the uneven collectives that vLLM's CPU one lacks."""
        return "vllm_ascend_moe.integration.communicator.AscendMoECpuCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuses a wrong configuration at start; chooses the worker; shares CPU cores among workers.

        Raises:
            ConfigError: see :func:`vllm_ascend_moe.config.parse_config`.
        """
        from vllm_ascend_moe.config import parse_config
        from vllm_ascend_moe.integration.cpu_binding import bind_workers

        config = parse_config(vllm_config.additional_config)
        parallel_config = vllm_config.parallel_config
        cls._refuse_unreachable_layers(vllm_config)
        cls._choose_mla_backend(vllm_config)
        sources = parallel_config.data_parallel_size * parallel_config.prefill_context_parallel_size
        if parallel_config.enable_expert_parallel and sources > 1:
            cls._choose_worker(parallel_config)
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        if config.bind_cpus:
            bind_workers(parallel_config)

    @staticmethod
    def _refuse_unreachable_layers(vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        if model is None or not vllm_config.parallel_config.enable_expert_parallel or not model.quantization:
            return
        if model.using_transformers_backend():
            raise UnsupportedError(
                f"quantization = {model.quantization!r} with expert parallelism and vLLM's Transformers backend: its "
                "MoE layers index other ranks' experts on CPU, and this plugin does not reach them. Serve with "
                "--model-impl vllm, or without --enable-expert-parallel."
            )

    @staticmethod
    def _choose_mla_backend(vllm_config: VllmConfig) -> None:
        """vLLM takes its AMX kernels for MLA wherever the processor has AMX, though they are for bfloat16 alone."""
        import torch
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        model, attention = vllm_config.model_config, vllm_config.attention_config
        if model is None or not model.use_mla or model.dtype == torch.bfloat16 or attention.backend is not None:
            return
        attention.backend = AttentionBackendEnum.CPU_MLA
        logger.info("MLA in %s: attention_backend = CPU_MLA.", model.dtype)

    @staticmethod
    def _choose_worker(parallel_config: ParallelConfig) -> None:
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = WORKER
        elif parallel_config.worker_cls != WORKER and parallel_config.use_sequence_parallel_moe:
            logger.warning(
                "worker_cls = %s is not %s: DeepSeek models will answer wrongly in steps of one token.",
                parallel_config.worker_cls,
                WORKER,
            )

    @classmethod
    def set_additional_forward_context(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Makes the token layouts of this forward, once for all its layers."""
        from vllm_ascend_moe.integration.forward_state import make_forward_layouts
        from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY

        context = super().set_additional_forward_context(*args, **kwargs)  # type: ignore[misc]
        layouts = make_forward_layouts(
            kwargs["vllm_config"].parallel_config, kwargs["dp_metadata"], kwargs["num_tokens"]
        )
        return {**context, FORWARD_LAYOUTS_KEY: layouts} if layouts.by_group else context


class AscendMoECpuPlatform(AscendMoEPlatformMixin, CpuPlatform):
    """For any CPU host."""


class AscendMoEZenCpuPlatform(AscendMoEPlatformMixin, ZenCpuPlatform):
    """For hosts where vLLM picks its Zen platform (AMD with zentorch installed)."""
