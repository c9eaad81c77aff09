"""Which row of the tile table a device gets, and how many programs it runs at a time."""

from __future__ import annotations

from functools import lru_cache

import torch

from vllm_ascend_moe.errors import InvalidValueError, ShapeError, UnsupportedError


def target_of(device: torch.device) -> str:
    """The table's name of the device of operands. Every launch asks for it.

    Raises:
        InvalidValueError: it is not the current device, on which Triton launches whatever the operands' device is.
        UnsupportedError: Triton kernels do not run there.
    """
    target = _target_of(device)
    if device.index is not None and device.index != (current := torch.accelerator.current_device_index()):
        limit, step = (
            f"the current device, index {current}",
            f"Make it the current one: torch.{device.type}.set_device().",
        )
        raise InvalidValueError("device", str(device), limit, step)
    return target


def same_device(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuses operands that are not where the first one is: kernels would take their addresses for that device's.

    Args:
        others: the other operands by their names in the call; None: absent.

    Raises:
        ShapeError: one is on another device; it names the argument.
    """
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ShapeError(f"{name}.device", str(tensor.device), f"{first.device}, as the others", "Move it there.")


def summary(tensor: torch.Tensor) -> str:
    """What an error says of a tensor that does not fit."""
    return f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"


@lru_cache(maxsize=16)
def _target_of(device: torch.device) -> str:
    if device.type == "cuda":
        return "hopper" if _capability(device)[0] == 9 else "cuda"
    if device.type == "npu":
        return "ascend"
    if device.type == "cpu" and interpreted():
        return "interpreter"
    raise UnsupportedError(
        f"Triton experts run on CUDA and NPU devices, not on {device}. Use the native or reference experts there, "
        "or set TRITON_INTERPRET=1 before the process starts to run these kernels slowly on a CPU."
    )


def _capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's compute capability; (0, 0) of an AMD GPU, whose numbers are other architectures: 9.4 is MI300."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)


def check_fp8(target: str, device: torch.device) -> None:
    """Raises UnsupportedError where the hardware has no fp8."""
    if target == "ascend":
        raise UnsupportedError("Ascend 910B has no fp8. Use int8 with scales, or bf16, there.")
    if device.type == "cuda" and torch.version.hip is not None:
        raise UnsupportedError(f"fp8 on AMD GPUs ({device}) was never tried. Use int8 or bf16 there.")
    if device.type == "cuda" and _capability(device) < (8, 9):
        raise UnsupportedError(f"{device} has no fp8 (compute capability 8.9 and later have). Use int8 or bf16 there.")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (decided by TRITON_INTERPRET when triton was imported)."""
    from triton.runtime.jit import JITFunction

    from vllm_ascend_moe.kernels.gemm import expert_gemm_kernel

    return not isinstance(expert_gemm_kernel, JITFunction)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """How many programs run at a time: multiprocessors of a GPU, cube cores of an NPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "npu":
        from triton.runtime import driver

        return int(driver.active.utils.get_device_properties(device.index or 0)["num_aicore"])
    return 3
