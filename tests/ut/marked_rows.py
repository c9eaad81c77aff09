"""Rows that say whose they are, and the padded layout made from them by hand. Needs torch alone."""

from __future__ import annotations

import torch


def rows(rank: int, size: int, width: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[size, width]: row i of rank r holds 16*r + i + 1 in column 0, 64 more in column 1, ... Never a pad value.

    Exact in every floating-point dtype for up to 8 ranks; int8 wraps, bool is True.
    """
    marks = (16 * rank + torch.arange(size) + 1)[:, None] + 64 * torch.arange(width)
    return marks.to(dtype)


def padded(sizes: list[int], pad: float = 0, width: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[R*M, width]: what a gather of ``rows`` must give, made rank by rank."""
    out = torch.full((len(sizes), max(sizes), width), pad, dtype=dtype)
    for rank, size in enumerate(sizes):
        out[rank, :size] = rows(rank, size, width, dtype)
    return out.flatten(0, 1)
