"""Launches without the search for the compiled kernel, which takes the host longer than the launch itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch
import triton

# By key, for the life of the process, as Triton keeps them itself.
_compiled: dict[Hashable, Any] = {}


@cache
def _reusable(device_type: str) -> bool:
    """Whether a compiled kernel takes all arguments in order, constants included (Triton 3.3 and later, on CUDA)."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return device_type == "cuda" and torch.version.hip is None and version >= (3, 3)


def launch(kernel: Any, programs: int, key: Hashable, arguments: Sequence[Any], **options: Any) -> None:
    """``kernel[(programs,)](*arguments, **options)`` on the current device and stream.

    The operands must be on the current device: ``target_of``, which callers ask for their tiles, refuses others. A
    kernel is loaded for the device it was first launched on.

    Args:
        arguments: all arguments of the kernel, in order, constants included.
        key: equal for two launches only if Triton compiles one and the same code for them: kernel, device, dtypes,
            constants, alignment of addresses (:func:`aligned`), and of integers that it specialises whether they are 1
            and whether they are multiples of 16.
    """
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*arguments)
        return
    compiled = kernel[(programs,)](*arguments, **options)
    if compiled is not None and _reusable(torch.accelerator.current_accelerator().type):  # type: ignore[union-attr]
        _compiled[key] = compiled


def aligned(x: torch.Tensor) -> bool:
    """Whether Triton takes the address for a multiple of 16."""
    return x.data_ptr() % 16 == 0
