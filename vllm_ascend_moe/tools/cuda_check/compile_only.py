"""Launches of the package's kernels that compile for a GPU that need not be there, and do not run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_PROCESSORS = 132  # multiprocessors of an H200: a kernel's grid is a constant of it


class _Driver:
    """What Triton asks a driver before it compiles; it has nothing that could launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def row_of_table(capability: int) -> str:
    """The tile table's name of a GPU of that compute capability; kernels/targets.py has it from the device."""
    return "hopper" if capability // 10 == 9 else "cuda"


@contextmanager
def compile_only(capability: int) -> Iterator[list[Any]]:
    """Inside, ``kernel[grid](...)`` compiles for a GPU of ``capability`` (80, 90, ...); operands may be on the CPU.

    For a process of its own: Triton's driver stays replaced.

    Yields:
        The compiled kernels, in the order of their launches.
    """
    compiled: list[Any] = []

    def getitem(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled.append(kernel.warmup(*arguments, grid=grid, **options))

        return launch

    known = {"target_of": row_of_table(capability), "processors": _PROCESSORS}
    driver.set_active(_Driver(capability))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "__getitem__", getitem))
        for module in _modules():
            for function, value in known.items():
                if hasattr(module, function):
                    stack.enter_context(mock.patch.object(module, function, lambda device, value=value: value))
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()  # by device, whatever its capability
        yield compiled


def _modules() -> list[Any]:
    """The modules of kernels that are loaded, but the one that asks the device."""
    return [m for n, m in list(sys.modules.items()) if "vllm_ascend_moe.kernels." in n and not n.endswith(".targets")]
