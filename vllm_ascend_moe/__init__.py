"""Expert-parallel Mixture-of-Experts for vLLM on Ascend NPUs, developed and tested without one.

Import layers, one direction only (``scripts/check_layers.py`` keeps this true)::

    errors, envs  ->  config, layout, placement  ->  ops  ->  kernels  ->  comm, experts, softnpu  ->  integration
                  ->  vllm_alias  ->  platform                                          ->  integration
                                        testing (all but integration, platform)      tools (everything)

Only ``integration/``, ``platform.py`` and ``ops/register_custom_ops.py`` import vLLM; the rest needs torch alone
(``kernels`` and ``experts/*triton*.py`` also triton, ``config`` also pydantic, which vLLM brings; ``softnpu`` needs
torch_npu, ``testing`` transformers, tokenizers, safetensors and numpy for its models, the checks in ``tools`` triton).
Importing this package does nothing: no torch, no vLLM, no registration. vLLM calls the two entry points below.
"""

from __future__ import annotations

__version__ = "0.1.0"


def register_platform() -> str | None:
    """Entry point ``vllm.platform_plugins``: the platform class this host gets, as a dotted name.

    Returns:
        The qualified name of our platform class, or None where this plugin has nothing to offer (another
        accelerator, or vllm-ascend is installed: vLLM accepts one out-of-tree platform only).
    """
    from vllm_ascend_moe.platform import choose_platform

    return choose_platform()


def register_ops() -> None:
    """Entry point ``vllm.general_plugins``: registers the custom ops and layers, once, in every vLLM process.

    Errors are not caught: vLLM stops with them, since a plugin that fails silently would serve with stock code.
    """
    from vllm_ascend_moe.integration import register

    register()
