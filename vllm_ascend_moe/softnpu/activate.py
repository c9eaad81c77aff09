"""Loads the kernels of the soft NPU into this process."""

from __future__ import annotations

import ctypes

from vllm_ascend_moe.softnpu.errors import SoftNPUError
from vllm_ascend_moe.softnpu.settings import is_oracle

_LIBRARY = "libsoftnpu_dispatch.so"
_done: list[ctypes.CDLL] = []


def activate() -> None:
    """Imports torch_npu and gives operators their kernels. Calling it again is harmless.

    Raises:
        SoftNPUError: the libraries are not on the loader's path: the program was not started with ``run``.
    """
    if _done:
        return
    try:
        import torch_npu  # noqa: F401  registers the device

        _done.append(ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL))
    except (ImportError, OSError) as error:
        raise SoftNPUError(
            f"ASCEND_MOE_SOFTNPU=1, but the soft NPU cannot be loaded: {error}. "
            "Start the program with `python -m vllm_ascend_moe.softnpu run -- ...`."
        ) from error
    from vllm_ascend_moe.softnpu.overrides import install

    if not is_oracle():
        install()
