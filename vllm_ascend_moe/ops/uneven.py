"""All-gather and reduce-scatter of as many rows as each rank has, without pad rows.

    HCCL        HcclAllGatherV, HcclReduceScatterV
    NCCL        a broadcast, respectively a reduction, for each rank, as one grouped launch
    others      all-to-all: a copy of the rows for each rank, and the sum in fp32 in the order of ranks

Symbols: R ranks of the group; T_r rows of rank r; T all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.ops.exchange import all_to_all
from vllm_ascend_moe.ops.torch_form import Group


def uneven_all_gather(x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """Every rank's rows, in the order of ranks.

    Args:
        x: [T_r, ...] this rank's rows, any strides.
        sizes: T_r of every rank, the same on all.
        group: the ranks.

    Returns:
        [T, ...], contiguous, a new tensor (also for R = 1).
    """
    _check_rows(x, sizes[group.rank_in_group])
    x = x.contiguous()
    if x.element_size() == 1 and x.dtype not in (torch.int8, torch.uint8):
        return uneven_all_gather(x.view(torch.uint8), sizes, group).view(x.dtype)  # what no backend sends
    if group.world_size == 1 or sum(sizes) == 0:
        return x.clone()
    process_group = _collective_group(group, x)
    if process_group is None:
        copies = x.repeat(group.world_size, *[1] * (x.dim() - 1))
        return all_to_all(group, copies, sizes, [x.shape[0]] * group.world_size)
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    if x.device.type == "npu":
        backend: Any = process_group._get_backend(x.device)
        backend.all_gather_into_tensor_uneven(out, x, list(sizes)).wait()
    else:
        dist.all_gather(list(out.split(list(sizes))), x, group=process_group)
    return out


def uneven_reduce_scatter(x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """The sum over ranks of this rank's rows.

    Args:
        x: [T, ...] this rank's contribution for every rank's rows, in the order of ranks.
        sizes: T_r of every rank, the same on all.
        group: the ranks.

    Returns:
        [T_r, ...], contiguous, a new tensor.

    Raises:
        ShapeError: ``x`` does not have T rows.
    """
    _check_rows(x, sum(sizes))
    x = x.contiguous()
    if group.world_size == 1 or x.shape[0] == 0:
        return x.clone()
    process_group = _collective_group(group, x)
    if process_group is None:
        return exchange_and_sum(x, sizes, group)
    out = x.new_empty((sizes[group.rank_in_group], *x.shape[1:]))
    if x.device.type == "npu":
        backend: Any = process_group._get_backend(x.device)
        backend.reduce_scatter_tensor_uneven(out, x, list(sizes), dist.ReduceScatterOptions()).wait()
    else:
        dist.reduce_scatter(out, list(x.split(list(sizes))), group=process_group)
    return out


def exchange_and_sum(x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """As :func:`uneven_reduce_scatter`, added in fp32 in the order of ranks: the same bits whatever the backend."""
    _check_rows(x, sum(sizes))
    rows = sizes[group.rank_in_group]
    parts = all_to_all(group, x.contiguous(), [rows] * group.world_size, sizes)
    parts = parts.view(group.world_size, rows, *x.shape[1:])
    total = parts.new_zeros(parts.shape[1:], dtype=torch.promote_types(parts.dtype, torch.float32))
    for part in parts:
        total += part
    return total.to(x.dtype)


def _collective_group(group: Group, x: torch.Tensor) -> dist.ProcessGroup | None:
    """The process group, where its backend has collectives of uneven sizes for tensors like ``x``."""
    process_group = getattr(group, "device_group", None)
    has = x.device.type in ("npu", "cuda") and isinstance(process_group, dist.ProcessGroup)
    return process_group if has else None


def _check_rows(x: torch.Tensor, rows: int) -> None:
    if x.shape[0] != rows:
        raise ShapeError("x.shape[0]", x.shape[0], f"{rows}, as the sizes say", "Pass the sizes of this forward.")
