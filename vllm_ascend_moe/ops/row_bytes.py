"""Rows of several tensors side by side as rows of bytes, so that one collective sends them all.

Columns follow each other, each from a multiple of its element size on, and a row is a multiple of 16 bytes. So every
column can be read in place, as a strided tensor of its dtype, and rows of the first one are aligned:

    hidden bf16 [T, 6], weights fp32 [T, 2], ids int32 [T, 2]
    bytes 0-11 hidden, 12-19 weights, 20-27 ids, 28-31 unused: 32 bytes a row

The native gather lays its rows out more widely (csrc/ops/row_format.h); the two never meet in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch

from vllm_ascend_moe.ops.extension import native_available

ROW_ALIGN = 16  # bytes; what vector loads of the expert kernels like


@dataclass(frozen=True)
class RowFormat:
    """Where each tensor's row is in a row of bytes. Build it with :meth:`of`."""

    columns: tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], ...]
    """dtype; shape and strides past the rows, the row's own stride included; first value, counted in values."""
    starts: tuple[int, ...]
    """First byte of each."""
    row_bytes: int

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> RowFormat:
        """The format of tensors [rows, ...], in this order. Cached.

        >>> x = torch.zeros(3, 6, dtype=torch.bfloat16), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
        >>> format = RowFormat.of(x)
        >>> format.starts, format.row_bytes
        ((0, 12, 20), 32)
        """
        return _format(tuple((x.dtype, x.shape[1:]) for x in tensors))

    def views(self, wire: torch.Tensor) -> list[torch.Tensor]:
        """One strided view of ``wire`` uint8 [rows, row_bytes] for each tensor."""
        rows = wire.shape[0]
        return [
            wire.view(dtype).as_strided((rows, *shape), strides, start) for dtype, shape, strides, start in self.columns
        ]

    def select(self, tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """uint8 [n, row_bytes]: the rows ``rows`` int64 [n] of the tensors."""
        if rows.device.type == "cpu" and native_available():
            return _pack()(tensors, rows, self.starts, self.row_bytes)
        wire = torch.empty((rows.shape[0], self.row_bytes), dtype=torch.uint8, device=rows.device)
        for x, view in zip(tensors, self.views(wire), strict=True):
            torch.index_select(x, 0, rows, out=view)
        return wire


@cache
def _pack() -> Any:
    return torch.ops.ascend_moe.pack_rows.default


@lru_cache(maxsize=256)
def _format(columns: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> RowFormat:
    starts, end = [], 0
    for dtype, shape in columns:
        starts.append(-(-end // dtype.itemsize) * dtype.itemsize)
        end = starts[-1] + prod(shape) * dtype.itemsize
    row_bytes = -(-end // ROW_ALIGN) * ROW_ALIGN
    placed = []
    for (dtype, shape), start in zip(columns, starts, strict=True):
        inner = (prod(shape[i + 1 :]) for i in range(len(shape)))
        placed.append((dtype, tuple(shape), (row_bytes // dtype.itemsize, *inner), start // dtype.itemsize))
    return RowFormat(tuple(placed), tuple(starts), row_bytes)
