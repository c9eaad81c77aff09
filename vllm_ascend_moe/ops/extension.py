"""Loads the native extension, once per process, on first use. Where it is not built, plain torch is used and logged."""

from __future__ import annotations

import logging
from functools import cache

import torch  # noqa: F401  the extension links against torch's libraries, which must be loaded before it

logger = logging.getLogger(__name__)


@cache
def native_available() -> bool:
    """Whether ``torch.ops.ascend_moe`` holds the native operators. The first call imports the extension."""
    try:
        import vllm_ascend_moe._native  # noqa: F401
    except ImportError as error:
        logger.warning(
            "The native extension of vllm-ascend-moe is not loaded (%s): collectives and CPU experts run in plain "
            "torch, which is slower. Build it with: pip install --no-build-isolation -e .",
            error,
        )
        return False
    return True
