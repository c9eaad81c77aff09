"""Padded all-gather and reduce-scatter: every rank sees every token, in the (R, M) layout, from dispatch to combine.

Nothing is unpadded or repacked in between: pad rows carry id -1, so that no expert works on them, and the tail is
dropped from this rank's own shard after the reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.comm.checks import check_dispatch_inputs, check_handle, comm_error
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.exchange import all_to_all
from vllm_ascend_moe.ops.native import Group, check_padded_rows, gather_rows, padded_reduce_scatter

# Below this many bytes a rank, one packed collective beats one for each tensor; see docs/performance.md.
DEFAULT_PACKED_BYTES = 2 << 20

# Of hidden, weights, ids, scales: pad rows route nowhere.
PAD_VALUES = (0, 0, -1, 0)


@dataclass(frozen=True)
class _Handle:
    layout: TokenLayout


class PaddedAllGather:
    """The strategy for prefill and for small groups. See :class:`~vllm_ascend_moe.comm.base.TokenComm`.

    Args:
        group: the ranks.
        packed_bytes: up to this many bytes a rank (its M rows of all tensors), everything travels in one collective
            as rows of bytes, and the gathered tensors are strided views of one buffer. Above, each tensor is
            gathered as it is, without a copy. 0 never packs. The same on every rank.
        exact: add partial sums in fp32 and in the order of ranks, for results that are the same bit for bit whatever
            the backend and the strategy. R times the bytes on the way back: for tests.

    Errors are raised before the first collective, on the rank whose inputs are wrong. The others wait for it until the
    collective fails or its timeout ends it: nothing is exchanged beforehand that could tell them.
    """

    format = ActivationFormat.ROWS

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
        """Gathers hidden [T_r, H], weights [T_r, K], ids [T_r, K] (and scales) to R*M rows.

        Raises:
            LayoutError: the tensors do not have the layout's local_size rows, or the group is not the layout's.
            ShapeError, DtypeError: shapes or dtypes that do not fit together.
            CommError: the backend failed.
        """
        check_dispatch_inputs(hidden, topk_weights, topk_ids, scales, num_experts, layout, self.group)
        tensors = [hidden, topk_weights, topk_ids] if scales is None else [hidden, topk_weights, topk_ids, scales]
        size = layout.max_local_size
        packed = size * row_bytes(tensors) <= self.packed_bytes
        try:
            gathered = gather_rows(tensors, PAD_VALUES[: len(tensors)], size, self.group, packed=packed)
        except RuntimeError as error:
            raise comm_error(error, "padded_allgather", "dispatch", self.group) from error
        return Dispatched(
            format=self.format,
            hidden=gathered[0],
            topk_weights=gathered[1],
            topk_ids=gathered[2],
            scales=None if scales is None else gathered[3],
            handle=_Handle(layout),
        )

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        """Sums the experts' outputs [R*M, H] over ranks; returns this rank's [T_r, H].

        Raises:
            ShapeError: another strategy's handle, or not R*M rows.
            CommError: the backend failed.
        """
        check_handle(handle, _Handle)
        assert isinstance(handle, _Handle)
        layout = handle.layout
        try:
            if self.exact:
                return self._exact_sum(expert_output, layout)
            return padded_reduce_scatter(expert_output, layout.max_local_size, layout.local_size, self.group)
        except RuntimeError as error:
            raise comm_error(error, "padded_allgather", "combine", self.group) from error

    def _exact_sum(self, expert_output: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """The reduce-scatter as an exchange of partial sums [R, M, H] and their sum here."""
        check_padded_rows(expert_output, layout.max_local_size, self.group)
        parts = all_to_all(self.group, expert_output.contiguous())
        parts = parts.view(layout.ep_size, layout.max_local_size, *expert_output.shape[1:])[:, : layout.local_size]
        total = parts.new_zeros(parts.shape[1:], dtype=torch.promote_types(parts.dtype, torch.float32))
        for part in parts:
            total += part
        return total.to(expert_output.dtype)


def row_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of one token in all tensors together."""
    total = 0
    for x in tensors:
        total += x.element_size() * (x.shape[1] if x.dim() == 2 else prod(x.shape[1:]))
    return total
