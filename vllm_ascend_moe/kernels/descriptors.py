"""Tensor descriptors of the expert GEMM's operands: whether Hopper's copy engine can take them, and their tiles."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ascend_moe.kernels.operands import Operands

_MAX_ROWS = 1 << 31  # descriptors are indexed with 32 bits
_ALIGNMENT = 16  # bytes, of the address and of every stride


def describable(a: torch.Tensor, w: torch.Tensor, op: Operands) -> bool:
    """Whether tensor descriptors can read the operands: aligned, rows at a whole pitch, few enough of them."""
    strides = [s * a.element_size() for s in (op.stride_am, op.stride_ae)]
    strides += [s * w.element_size() for s in (op.stride_be, op.stride_bp, op.stride_bn)]
    addresses = (a.data_ptr(), w.data_ptr())
    return (
        not any(number % _ALIGNMENT for number in (*strides, *addresses))
        and op.a_pitch >= 0
        and op.stride_am > 0
        and op.k > 0
        and op.experts * op.a_pitch + op.capacity < _MAX_ROWS
    )


def storable(out: torch.Tensor, w: torch.Tensor, op: Operands) -> bool:
    """Whether results can be stored through a descriptor. Wider ones than the weights have no room to be gathered."""
    strides = [s * out.element_size() for s in (op.stride_cm, op.stride_ce)]
    return (
        not any(number % _ALIGNMENT for number in (*strides, out.data_ptr()))
        and op.c_pitch >= 0
        and op.stride_cm > 0
        and op.experts * op.c_pitch + op.capacity < _MAX_ROWS
        and out.element_size() <= w.element_size()
    )


def rows_view(a: torch.Tensor, op: Operands, rows: int, depth: int) -> Any:
    """The descriptor of ``a`` as one list of rows [experts * a_pitch, K], with tiles [rows, depth]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    total = (op.experts - 1) * op.a_pitch + op.capacity
    return TensorDescriptor(a, [total, op.k], [op.stride_am, 1], [rows, depth])


def results_view(out: torch.Tensor, op: Operands, rows: int, columns: int) -> Any:
    """The descriptor of the results as one list of rows [experts * c_pitch, N], with tiles [rows, columns]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    total = (op.experts - 1) * op.c_pitch + op.capacity
    return TensorDescriptor(out, [total, op.n], [op.stride_cm, 1], [rows, columns])


def weights_view(w: torch.Tensor, op: Operands, columns: int, depth: int) -> Any:
    """The descriptor of ``w`` as [E_l, parts, N, K], with tiles of ``columns`` weight rows over all parts."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [op.stride_be, op.stride_bp, op.stride_bn, 1]
    block = [1, op.parts, columns // op.parts, depth]
    return TensorDescriptor(w, [op.experts, op.parts, op.n, op.k], strides, block)
