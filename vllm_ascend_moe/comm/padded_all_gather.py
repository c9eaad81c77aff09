"""Padded all-gather and reduce-scatter: every rank sees every token, in the (R, M) layout, from dispatch to combine.

Nothing is unpadded or repacked in between: pad rows carry id -1, so that no expert works on them, and the tail is
dropped from this rank's own shard after the reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.comm.checks import check_dispatch_inputs
from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import Group, padded_all_gather, padded_reduce_scatter


@dataclass(frozen=True)
class _Handle:
    layout: TokenLayout


class PaddedAllGather:
    """The strategy for prefill and for small groups. See :class:`~vllm_ascend_moe.comm.base.TokenComm`."""

    format = ActivationFormat.ROWS

    def __init__(self, group: Group) -> None:
        self.group = group

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
            ShapeError: shapes or dtypes that do not fit together.
        """
        check_dispatch_inputs(hidden, topk_weights, topk_ids, scales, num_experts, layout, self.group)
        size = layout.max_local_size
        return Dispatched(
            format=self.format,
            hidden=padded_all_gather(hidden, size, self.group),
            topk_weights=padded_all_gather(topk_weights, size, self.group),
            topk_ids=padded_all_gather(topk_ids, size, self.group, pad_value=-1),
            scales=None if scales is None else padded_all_gather(scales, size, self.group),
            handle=_Handle(layout),
        )

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        """Sums the experts' outputs [R*M, H] over ranks; returns this rank's [T_r, H].

        Raises:
            ShapeError: another strategy's handle, or not R*M rows.
        """
        if not isinstance(handle, _Handle):
            raise ShapeError(
                "handle", type(handle).__name__, "the handle of this dispatch", "Pass Dispatched.handle unchanged."
            )
        layout = handle.layout
        return padded_reduce_scatter(expert_output, layout.max_local_size, layout.local_size, self.group)
