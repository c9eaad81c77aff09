"""aclnn functions called directly: for versions that torch_npu would call only with another CANN."""

import ctypes
from typing import Any

import torch

_ops = ctypes.CDLL("libopapi.so")
_TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.int64: 9, torch.bfloat16: 27}
_FORMAT_ND = 2
for _name in ("aclCreateTensor", "aclCreateTensorList"):
    getattr(_ops, _name).restype = ctypes.c_void_p


def _sizes(values) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _tensor(t: torch.Tensor) -> ctypes.c_void_p:
    sizes = (_sizes(t.shape), ctypes.c_uint64(t.dim()))
    storage = (_sizes([t.numel()]), ctypes.c_uint64(1), ctypes.c_void_p(t.data_ptr()))
    return ctypes.c_void_p(
        _ops.aclCreateTensor(*sizes, _TYPES[t.dtype], _sizes(t.stride()), ctypes.c_int64(0), _FORMAT_ND, *storage)
    )


def _argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p()
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, list):
        made = (ctypes.c_void_p * len(value))(*(_tensor(t) for t in value))
        return ctypes.c_void_p(_ops.aclCreateTensorList(made, ctypes.c_uint64(len(value))))
    return ctypes.c_bool(value) if isinstance(value, bool) else ctypes.c_int64(value)


def aclnn(name: str, *arguments: Any) -> None:
    """Calls ``name`` with NPU tensors, lists of them, None, bools and integers, in CANN's order."""
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    given = [_argument(a) for a in arguments]
    assert getattr(_ops, f"{name}GetWorkspaceSize")(*given, ctypes.byref(size), ctypes.byref(executor)) == 0
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    assert getattr(_ops, name)(ctypes.c_void_p(), size, executor, stream) == 0
