"""What the strategies share that bring every token to every rank: one contract, two ways to lay rows out.

Symbols: T_r tokens of this rank; M max(T_r); K top-k; H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.comm.checks import check_dispatch_inputs, check_handle, comm_error
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import Group

# Below this many bytes a rank, one packed collective beats one for each tensor; see docs/performance.md.
DEFAULT_PACKED_BYTES = 2 << 20


@dataclass(frozen=True)
class AllGatherHandle:
    """What combine needs; each strategy has a class of its own, so that no other's is taken for it."""

    layout: TokenLayout


class AllGather:
    """A strategy of an all-gather and a reduce-scatter. See :class:`~vllm_ascend_moe.comm.base.TokenComm`.

    Args:
        group: the ranks.
        packed_bytes: up to this many bytes a rank (M rows of all tensors), everything travels in one collective as
            rows of bytes, and the gathered tensors are strided views of one buffer. Above, each tensor is gathered
            as it is, without a copy. 0 never packs. The same on every rank.
        exact: add partial sums in fp32 and in the order of ranks, for results that are the same bit for bit whatever
            the backend and the strategy. R times the bytes on the way back: for tests.

    Errors are raised before the first collective, on the rank whose inputs are wrong. The others wait for it until the
    collective fails or its timeout ends it: nothing is exchanged beforehand that could tell them.
    """

    format = ActivationFormat.ROWS
    name: ClassVar[str]
    handle: ClassVar[type[AllGatherHandle]]

    def __init__(self, group: Group, packed_bytes: int = DEFAULT_PACKED_BYTES, exact: bool = False) -> None:
        self.group = group
        self.packed_bytes = packed_bytes
        self.exact = exact

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        num_experts: int,
        layout: TokenLayout,
        scales: torch.Tensor | None = None,
    ) -> Dispatched:
        """Gathers hidden [T_r, H], weights [T_r, K], ids [T_r, K] (and scales) of all ranks.

        Raises:
            LayoutError: the tensors do not have the layout's local_size rows, or the group is not the layout's.
            ShapeError, DtypeError: shapes or dtypes that do not fit together.
            CommError: the backend failed.
        """
        check_dispatch_inputs(hidden, topk_weights, topk_ids, scales, num_experts, layout, self.group)
        tensors = [hidden, topk_weights, topk_ids] if scales is None else [hidden, topk_weights, topk_ids, scales]
        packed = layout.max_local_size * row_bytes(tensors) <= self.packed_bytes
        try:
            gathered = self._gather(tensors, layout, packed)
        except RuntimeError as error:
            raise comm_error(error, self.name, "dispatch", self.group) from error
        return Dispatched(
            format=self.format,
            hidden=gathered[0],
            topk_weights=gathered[1],
            topk_ids=gathered[2],
            scales=None if scales is None else gathered[3],
            handle=self.handle(layout),
        )

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        """Sums the experts' outputs, as many rows as were gathered, over ranks; returns this rank's [T_r, H].

        Raises:
            ShapeError: another strategy's handle, or another number of rows.
            CommError: the backend failed.
        """
        check_handle(handle, self.handle)
        assert isinstance(handle, AllGatherHandle)
        try:
            return self._reduce(expert_output, handle.layout)
        except RuntimeError as error:
            raise comm_error(error, self.name, "combine", self.group) from error

    def _gather(self, tensors: Sequence[torch.Tensor], layout: TokenLayout, packed: bool) -> list[torch.Tensor]:
        raise NotImplementedError

    def _reduce(self, expert_output: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        raise NotImplementedError


def row_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of one token in all tensors together."""
    total = 0
    for x in tensors:
        total += x.element_size() * (x.shape[1] if x.dim() == 2 else prod(x.shape[1:]))
    return total
