"""Padded collectives: the native operators where the extension is built and the group is a real process group, else
plain torch (:mod:`vllm_ascend_moe.ops.torch_form`). Both give the same values, shapes and strides.

Symbols: R ranks of the group; M max_local_size; T_r tokens of this rank; x rows on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.ops import torch_form
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.ops.torch_form import Group, TorchGroup, check_rows, pad_rows

__all__ = [
    "Group",
    "TorchGroup",
    "check_padded_rows",
    "coalesced_all_gather",
    "gather_rows",
    "packed_all_gather",
    "pad_rows",
    "padded_all_gather",
    "padded_reduce_scatter",
]

# By process group; None where native code cannot find it. Weak: a destroyed group must not be kept alive here.
_names: WeakKeyDictionary[dist.ProcessGroup, str | None] = WeakKeyDictionary()


def _look_up_name(process_group: dist.ProcessGroup) -> str | None:
    if not native_available():
        return None
    name = process_group.group_name
    try:
        torch._C._distributed_c10d._resolve_process_group(name)
    except RuntimeError:
        return None  # made without init_process_group or new_group, so not registered under its name
    return name


class _Operators(NamedTuple):
    """The operators of csrc/ops, looked up once: a look-up in ``torch.ops`` costs as much as a small operator."""

    gather: Any
    packed: Any
    views: Any
    coalesced: Any
    reduce: Any


@cache
def _operators() -> _Operators:
    ops = torch.ops.ascend_moe
    return _Operators(
        gather=ops.padded_all_gather.default,
        packed=ops.packed_all_gather.default,
        views=ops.row_views.default,
        coalesced=ops.coalesced_all_gather.default,
        reduce=ops.padded_reduce_scatter.default,
    )


def native_group_name(group: Group) -> str | None:
    """The name by which native code finds ``group``, or None where plain torch must be used."""
    process_group = getattr(group, "device_group", None)
    if not isinstance(process_group, dist.ProcessGroup):
        return None
    try:
        return _names[process_group]
    except KeyError:
        name = _names[process_group] = _look_up_name(process_group)
        return name


def padded_all_gather(x: torch.Tensor, max_local_size: int, group: Group, pad_value: float = 0) -> torch.Tensor:
    """Gathers every rank's rows in the padded layout.

    Args:
        x: [T_r, ...] this rank's rows, any strides, any dtype of 1, 2, 4 or 8 bytes.
        max_local_size: M, the same on every rank.
        group: the ranks.
        pad_value: what pad rows hold (-1 for ids, so that they route nowhere).

    Returns:
        [R*M, ...], contiguous, a new tensor (also for R = 1).

    Raises:
        LayoutError: more rows than M.
    """
    name = native_group_name(group)
    if name is None:
        return torch_form.all_gather(x, max_local_size, group, pad_value)
    check_rows(x, max_local_size)
    return _operators().gather(x, max_local_size, name, pad_value)


def packed_all_gather(
    tensors: Sequence[torch.Tensor], pad_values: Sequence[int], max_local_size: int, group: Group
) -> list[torch.Tensor]:
    """Gathers several tensors in **one** collective: their rows travel side by side, as bytes.

    Args:
        tensors: each [T_r, ...] with the same T_r of at most M; any dtypes.
        pad_values: for each tensor, what its pad rows hold.
        max_local_size: M; group: the ranks.

    Returns:
        For each tensor [R*M, ...]: views of one buffer, so rows are strided (16-byte aligned) and a row is contiguous.

    Raises:
        LayoutError: more rows than M.
        ShapeError: tensors with different numbers of rows.
    """
    _check_rows_of_all(tensors, max_local_size)
    return gather_rows(tensors, pad_values, max_local_size, group, packed=True)


def coalesced_all_gather(
    tensors: Sequence[torch.Tensor], pad_values: Sequence[int], max_local_size: int, group: Group
) -> list[torch.Tensor]:
    """Gathers several tensors as :func:`padded_all_gather` does each, in one launch where the backend can.

    Raises:
        LayoutError: more rows than M.
        ShapeError: tensors with different numbers of rows.
    """
    _check_rows_of_all(tensors, max_local_size)
    return gather_rows(tensors, pad_values, max_local_size, group, packed=False)


def gather_rows(
    tensors: Sequence[torch.Tensor], pad_values: Sequence[int], max_local_size: int, group: Group, *, packed: bool
) -> list[torch.Tensor]:
    """Packed or coalesced gather of tensors whose rows the caller has checked; native code still refuses wrong ones."""
    name = native_group_name(group)
    if name is not None:
        ops = _operators()
        if not packed:
            return ops.coalesced(tensors, pad_values, max_local_size, name)
        return ops.views(ops.packed(tensors, pad_values, max_local_size, name), tensors)
    if packed:
        return torch_form.packed_all_gather(tensors, pad_values, max_local_size, group)
    pairs = zip(tensors, pad_values, strict=True)
    return [torch_form.all_gather(x, max_local_size, group, value) for x, value in pairs]


def padded_reduce_scatter(x: torch.Tensor, max_local_size: int, local_size: int, group: Group) -> torch.Tensor:
    """Sums the padded layout over ranks and returns this rank's tokens; the pad tail is dropped here and only here.

    Args:
        x: [R*M, ...] this rank's contribution for every rank's rows.
        max_local_size: M; local_size: T_r of this rank.
        group: the ranks.

    Returns:
        [T_r, ...], a new tensor (in plain torch a view of the collective's own output; never of ``x``).

    Raises:
        ShapeError: ``x`` does not have R*M rows.
    """
    check_padded_rows(x, max_local_size, group)
    name = native_group_name(group)
    if name is None:
        return torch_form.reduce_scatter(x, max_local_size, local_size, group)
    return _operators().reduce(x, max_local_size, local_size, name)


def check_padded_rows(x: torch.Tensor, max_local_size: int, group: Group) -> None:
    """Raises ShapeError where ``x`` does not have R*M rows."""
    rows = group.world_size * max_local_size
    if x.shape[0] != rows:
        raise ShapeError(
            "x.shape[0]",
            x.shape[0],
            f"ep_size * max_local_size = {group.world_size} * {max_local_size} = {rows}",
            "Pass a tensor in the padded layout, as the paired gather returned it.",
        )


def _check_rows_of_all(tensors: Sequence[torch.Tensor], max_local_size: int) -> None:
    rows = tensors[0].shape[0]
    check_rows(tensors[0], max_local_size)
    for i, x in enumerate(tensors):
        if x.shape[0] != rows:
            raise ShapeError(
                f"tensors[{i}].shape[0]", x.shape[0], f"{rows}, as in tensors[0]", "Pass one row per token in each."
            )
