"""Padded collectives, in plain torch: the form that always works and that the native one is tested against.

Symbols: R ranks of the group; M max_local_size; T_r tokens of this rank; x rows on this rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from vllm_ascend_moe.errors import LayoutError, ShapeError


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
        dist.all_gather_into_tensor(out, input_, group=self.device_group)
        return out

    def reduce_scatter(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[R*n, ...] -> [n, ...], the sum over ranks of this rank's block. Only dim 0."""
        out = input_.new_empty((input_.shape[0] // self.world_size, *input_.shape[1:]))
        dist.reduce_scatter_tensor(out, input_, group=self.device_group)
        return out


def pad_rows(x: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
    """Pads dim 0 to ``rows``, in the same dtype, contiguous. Returns ``x`` itself where nothing is to do.

    Raises:
        LayoutError: ``x`` has more than ``rows`` rows (never truncated).
    """
    if x.shape[0] == rows:
        # Collectives read memory in order: NCCL and HCCL corrupt strided inputs, gloo only happens not to.
        return x.contiguous()
    if x.shape[0] > rows:
        raise LayoutError(
            "x.shape[0]",
            x.shape[0],
            f"at most max_local_size = {rows} rows",
            "Pass this rank's own tokens; the token counts agreed for this forward do not cover them.",
        )
    padded = x.new_empty((rows, *x.shape[1:]))
    padded[: x.shape[0]] = x
    padded[x.shape[0] :] = value
    return padded


def padded_all_gather(x: torch.Tensor, max_local_size: int, group: Group, pad_value: float = 0) -> torch.Tensor:
    """Gathers every rank's rows in the padded layout.

    Args:
        x: [T_r, ...] this rank's rows, any strides.
        max_local_size: M, the same on every rank.
        group: the ranks.
        pad_value: what pad rows hold (-1 for ids, so that they route nowhere).

    Returns:
        [R*M, ...], contiguous, a new tensor (also for R = 1).

    Raises:
        LayoutError: more rows than M.
    """
    padded = pad_rows(x, max_local_size, pad_value)
    if max_local_size == 0:
        return x.new_empty((0, *x.shape[1:]))
    if group.world_size == 1:
        return padded.clone() if padded is x else padded
    return group.all_gather(padded, 0)


def padded_reduce_scatter(x: torch.Tensor, max_local_size: int, local_size: int, group: Group) -> torch.Tensor:
    """Sums the padded layout over ranks and returns this rank's tokens; the pad tail is dropped here and only here.

    Args:
        x: [R*M, ...] this rank's contribution for every rank's rows.
        max_local_size: M; local_size: T_r of this rank.
        group: the ranks.

    Returns:
        [T_r, ...], a new tensor (a view of the collective's own output where rows are dropped; never of ``x``).

    Raises:
        ShapeError: ``x`` does not have R*M rows.
    """
    rows = group.world_size * max_local_size
    if x.shape[0] != rows:
        raise ShapeError(
            "x.shape[0]",
            x.shape[0],
            f"ep_size * max_local_size = {group.world_size} * {max_local_size} = {rows}",
            "Pass a tensor in the padded layout, as the paired gather returned it.",
        )
    if max_local_size == 0:
        return x.new_empty((0, *x.shape[1:]))
    if group.world_size == 1:
        # Contiguous as on more ranks, and as the fake implementation says: a plain clone keeps a transpose's strides.
        return x[:local_size].clone(memory_format=torch.contiguous_format)
    return group.reduce_scatter(x.contiguous(), 0)[:local_size]
