"""Everything that touches vLLM's model code. :func:`register` is what the general-plugin entry point calls."""

from __future__ import annotations

from vllm_ascend_moe import envs


def register() -> None:
    """Registers the custom ops, and our layers where our platform is the current one. Harmless when called again.

    Out-of-tree layers replace vLLM's on every platform of the process, so they are registered only where our
    platform class runs: a stock CUDA host keeps its own MoE methods.

    Raises:
        MissingDependencyError: vLLM has a version this package was not made for.
    """
    from vllm_ascend_moe.platform import check_vllm_version, logger, vllm_ascend_installed

    if not envs.get("ASCEND_MOE_ENABLE"):
        logger.info("vllm-ascend-moe is switched off by ASCEND_MOE_ENABLE=0.")
        return
    if vllm_ascend_installed():
        # It keeps its platform and layers; its operators, which have the same names as ours, get our implementations.
        from vllm_ascend_moe.integration import vllm_ascend

        vllm_ascend.register()
        return
    check_vllm_version()

    from vllm.platforms import current_platform

    from vllm_ascend_moe.integration.cpu_platform import AscendMoEPlatformMixin
    from vllm_ascend_moe.ops.register_custom_ops import register_custom_ops

    register_custom_ops()
    if isinstance(current_platform, AscendMoEPlatformMixin):
        from vllm_ascend_moe.integration.layers import register_layers

        register_layers()
        ask_for_amx()
    elif current_platform.is_cpu():
        logger.warning(
            "vllm-ascend-moe is loaded, but vLLM runs its own CPU platform: data parallelism with expert parallelism "
            "will fail, and additional_config.ascend_moe is not read. VLLM_TARGET_DEVICE=cpu makes vLLM skip all "
            "platform plugins: unset it."
        )


def ask_for_amx() -> None:
    """Asks Linux for AMX tiles, as a process must before it uses any.

    vLLM's attention for bfloat16 does not ask: it ends in an illegal instruction where nothing else has asked before.
    A refusal is logged.
    """
    import torch

    from vllm_ascend_moe.platform import logger

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning(
            "The processor has AMX, but Linux refuses its tiles to this process, as where a thread has a signal stack "
            "too small for them. vLLM's kernels for bfloat16 use tiles all the same and end in an illegal instruction: "
            "serve with --dtype float32 or float16."
        )
