"""Loads the aten kernels of the soft NPU into this process."""

from __future__ import annotations

import ctypes

from vllm_ascend_moe.softnpu.errors import SoftNPUError


def activate() -> None:
    """Imports torch_npu and gives plain aten operators their kernels. Calling it again is harmless.

    Raises:
        SoftNPUError: the libraries are not on the loader's path: the program was not started with ``run``.
    """
    try:
        import torch_npu  # noqa: F401  registers the device

        ctypes.CDLL("libsoftnpu_dispatch.so", mode=ctypes.RTLD_GLOBAL)
    except (ImportError, OSError) as error:
        raise SoftNPUError(
            f"ASCEND_MOE_SOFTNPU=1, but the soft NPU cannot be loaded: {error}. "
            "Start the program with `python -m vllm_ascend_moe.softnpu run -- ...`."
        ) from error
