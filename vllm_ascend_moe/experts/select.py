"""The expert kernel a configuration names, for a device. Needs torch alone (triton where it is named)."""

from __future__ import annotations

from importlib.util import find_spec

from vllm_ascend_moe.errors import InvalidValueError, MissingDependencyError, UnsupportedError
from vllm_ascend_moe.experts.base import BatchedExperts, RowsExperts
from vllm_ascend_moe.experts.native import NativeExperts
from vllm_ascend_moe.experts.npu import NpuExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.experts.torch_form import TorchExperts
from vllm_ascend_moe.ops.extension import native_available

NAMES = ("auto", "native", "torch", "reference", "triton", "npu")


def resolve_experts(name: str, device_type: str) -> str:
    """Which kernel ``name`` is on a device.

    "auto" is native on CPU where the extension is built, triton on CUDA where triton is installed, npu on an NPU where
    torch_npu is installed, else torch. The Triton kernels lower for Ascend 910B, but have not been run on one; they can
    be named.

    Args:
        name: one of NAMES.
        device_type: "cpu", "cuda" or "npu".

    Returns:
        "native", "torch", "reference", "triton" or "npu".

    Raises:
        InvalidValueError: an unknown name.
        UnsupportedError: a kernel that does not run on the device.
        MissingDependencyError: the extension is not built, or triton or torch_npu is not installed.
    """
    if name not in NAMES:
        raise InvalidValueError("experts", name, f"one of {', '.join(NAMES)}", "Choose one of these kernels.")
    if name == "auto":
        return _automatic(device_type)
    if name == "native" and device_type != "cpu":
        raise UnsupportedError(f'experts = "native" runs on CPU, but the device is {device_type}. Choose "auto".')
    if name == "native" and not native_available():
        raise MissingDependencyError(
            'experts = "native" needs the native extension, which is not built. Build it with '
            '`pip install --no-build-isolation -e .`, or choose "auto".'
        )
    if name == "triton" and device_type == "cpu":
        raise UnsupportedError('experts = "triton" runs on CUDA and NPU devices, but the device is cpu. Choose "auto".')
    if name == "triton" and find_spec("triton") is None:
        raise MissingDependencyError(
            'experts = "triton" needs triton (triton-ascend on an NPU), which is not installed. Install it, or choose '
            '"auto".'
        )
    if name == "npu" and device_type != "npu":
        raise UnsupportedError(f'experts = "npu" runs on NPU devices, but the device is {device_type}. Choose "auto".')
    if name == "npu" and find_spec("torch_npu") is None:
        raise MissingDependencyError(
            'experts = "npu" needs torch_npu, which is not installed. Install the torch-npu of your torch version, or '
            'choose "auto".'
        )
    return name


def _automatic(device_type: str) -> str:
    if device_type == "cpu" and native_available():
        return "native"
    needed = {"cuda": ("triton", "triton"), "npu": ("npu", "torch_npu")}.get(device_type)
    return needed[0] if needed is not None and find_spec(needed[1]) is not None else "torch"


def make_rows_experts(name: str = "auto", device_type: str = "cpu") -> RowsExperts:
    """The kernel of the rows format. See :func:`resolve_experts` for arguments and errors."""
    resolved = resolve_experts(name, device_type)
    if resolved == "triton":
        from vllm_ascend_moe.experts.rows_triton import TritonRowsExperts

        return TritonRowsExperts()
    return _KERNELS[resolved]()


def make_batched_experts(
    name: str = "auto", device_type: str = "cpu", *, expected_rows: int | None = None
) -> BatchedExperts:
    """The kernel of the batched format. See :func:`resolve_experts` for arguments and errors.

    Args:
        name: one of NAMES.
        device_type: "cpu", "cuda" or "npu".
        expected_rows: rows an expert usually has, about tokens * K / E; a hint for the Triton kernel's tiles.
    """
    resolved = resolve_experts(name, device_type)
    if resolved == "triton":
        from vllm_ascend_moe.experts.batched_triton import TritonBatchedExperts

        return TritonBatchedExperts(expected_rows)
    return _KERNELS[resolved]()


_KERNELS: dict[str, type[NativeExperts] | type[TorchExperts] | type[ReferenceExperts] | type[NpuExperts]] = {
    "native": NativeExperts,
    "torch": TorchExperts,
    "reference": ReferenceExperts,
    "npu": NpuExperts,
}
