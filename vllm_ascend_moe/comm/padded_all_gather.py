"""Padded all-gather and reduce-scatter: every rank sees every token, in the (R, M) layout, from dispatch to combine.

Nothing is unpadded or repacked in between: pad rows carry id -1, so that no expert works on them, and the tail is
dropped from this rank's own shard after the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ascend_moe.comm.all_gather import AllGather, AllGatherHandle
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import check_padded_rows, gather_rows, padded_reduce_scatter
from vllm_ascend_moe.ops.uneven import exchange_and_sum

# Of hidden, weights, ids, scales: pad rows route nowhere.
PAD_VALUES = (0, 0, -1, 0)


class _Handle(AllGatherHandle):
    pass


class PaddedAllGather(AllGather):
    """The strategy for prefill and for small groups: R*M rows. See :class:`~vllm_ascend_moe.comm.all_gather.AllGather`
    for its arguments and errors."""

    name = "padded_allgather"
    handle = _Handle

    def _gather(self, tensors: Sequence[torch.Tensor], layout: TokenLayout, packed: bool) -> list[torch.Tensor]:
        return gather_rows(tensors, PAD_VALUES[: len(tensors)], layout.max_local_size, self.group, packed=packed)

    def _reduce(self, expert_output: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        size = layout.max_local_size
        if not self.exact:
            return padded_reduce_scatter(expert_output, size, layout.local_size, self.group)
        check_padded_rows(expert_output, size, self.group)
        return exchange_and_sum(expert_output, (size,) * layout.ep_size, self.group)[: layout.local_size]
