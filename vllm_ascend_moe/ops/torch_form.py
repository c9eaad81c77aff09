"""Padded collectives in plain torch: the form that always works and that the native one is tested against.

Symbols: R ranks of the group; M max_local_size; T_r tokens of this rank; x rows on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from vllm_ascend_moe.errors import LayoutError

COLUMN_ALIGN = 16  # bytes; see csrc/ops/row_format.h, which lays rows out in the same way

# What every backend can send. Others travel as the same bytes in a type that is among these.
_WIRE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16} | {torch.int8, torch.uint8, torch.int32, torch.int64}
)
_WIRE_BY_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}

# torch 2.13 gave these their new names and deprecated the old ones.
_NEW_NAMES = hasattr(dist, "all_gather_single")
_gather_single = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
_reduce_single = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor


class Group(Protocol):
    """A group of ranks, as vLLM's GroupCoordinator offers it. :class:`TorchGroup` gives it to a bare process group."""

    world_size: int
    rank_in_group: int

    def all_gather(self, input_: torch.Tensor, dim: int) -> torch.Tensor: ...

    def reduce_scatter(self, input_: torch.Tensor, dim: int) -> torch.Tensor: ...


class TorchGroup:
    """:class:`Group` over a ``torch.distributed`` process group (gloo, NCCL, HCCL)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.device_group = group
        self.world_size = dist.get_world_size(group)
        self.rank_in_group = dist.get_rank(group)

    def all_gather(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[n, ...] -> [R*n, ...], rank by rank. Only dim 0."""
        out = input_.new_empty((self.world_size * input_.shape[0], *input_.shape[1:]))
        _gather_single(out, input_, group=self.device_group)
        return out

    def reduce_scatter(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[R*n, ...] -> [n, ...], the sum over ranks of this rank's block. Only dim 0."""
        out = input_.new_empty((input_.shape[0] // self.world_size, *input_.shape[1:]))
        _reduce_single(out, input_, group=self.device_group)
        return out


def pad_rows(x: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
    """Pads dim 0 to ``rows``, in the same dtype, contiguous. Returns ``x`` itself where nothing is to do.

    Raises:
        LayoutError: ``x`` has more than ``rows`` rows (never truncated).
    """
    if x.shape[0] == rows:
        # Collectives read memory in order: NCCL and HCCL corrupt strided inputs, gloo only happens not to.
        return x.contiguous()
    check_rows(x, rows)
    padded = x.new_empty((rows, *x.shape[1:]))
    padded[: x.shape[0]] = x
    padded[x.shape[0] :] = value
    return padded


def check_rows(x: torch.Tensor, rows: int) -> None:
    """Raises LayoutError where ``x`` has more than ``rows`` rows."""
    if x.shape[0] > rows:
        raise LayoutError(
            "x.shape[0]",
            x.shape[0],
            f"at most max_local_size = {rows} rows",
            "Pass this rank's own tokens; the token counts agreed for this forward do not cover them.",
        )


def all_gather(x: torch.Tensor, max_local_size: int, group: Group, pad_value: float = 0) -> torch.Tensor:
    """See :func:`vllm_ascend_moe.ops.native.padded_all_gather`."""
    padded = pad_rows(x, max_local_size, pad_value)
    if max_local_size == 0:
        return x.new_empty((0, *x.shape[1:]))
    if group.world_size == 1:
        return padded.clone(memory_format=torch.contiguous_format) if padded is x else padded
    if x.dtype in _WIRE_DTYPES:
        return group.all_gather(padded, 0)
    # A dim of size 1 may have any stride in a tensor that calls itself contiguous, and view() would refuse it.
    dense = padded if padded.stride(-1) == 1 else padded.clone(memory_format=torch.contiguous_format)
    return group.all_gather(dense.view(_WIRE_BY_SIZE[x.element_size()]), 0).view(x.dtype)


def packed_all_gather(
    tensors: Sequence[torch.Tensor], pad_values: Sequence[int], max_local_size: int, group: Group
) -> list[torch.Tensor]:
    """See :func:`vllm_ascend_moe.ops.native.packed_all_gather`."""
    starts, row_bytes = [], 0
    for x in tensors:
        starts.append(row_bytes)
        row_bytes += -(-prod(x.shape[1:]) * x.element_size() // COLUMN_ALIGN) * COLUMN_ALIGN
    wire = torch.zeros((max_local_size, row_bytes), dtype=torch.uint8, device=tensors[0].device)
    if max_local_size:
        for x, start, value in zip(tensors, starts, pad_values, strict=True):
            _column(wire, x, start).copy_(pad_rows(x, max_local_size, value))
    gathered = all_gather(wire, max_local_size, group)
    return [_column(gathered, x, start) for x, start in zip(tensors, starts, strict=True)]


def _column(wire: torch.Tensor, like: torch.Tensor, start: int) -> torch.Tensor:
    """The tensor whose rows begin ``start`` bytes into the rows of ``wire``, as a strided view."""
    shape = (wire.shape[0], *like.shape[1:])
    inner = torch.empty(shape[1:], device="meta").stride()
    row_stride = wire.shape[1] // like.element_size()
    return wire.view(like.dtype).as_strided(shape, (row_stride, *inner), start // like.element_size())


def reduce_scatter(x: torch.Tensor, max_local_size: int, local_size: int, group: Group) -> torch.Tensor:
    """See :func:`vllm_ascend_moe.ops.native.padded_reduce_scatter`."""
    if max_local_size == 0:
        return x.new_empty((0, *x.shape[1:]))
    if group.world_size == 1:
        # Contiguous as on more ranks, and as the fake implementation says: a plain clone keeps a transpose's strides.
        return x[:local_size].clone(memory_format=torch.contiguous_format)
    return group.reduce_scatter(x.contiguous(), 0)[:local_size]
