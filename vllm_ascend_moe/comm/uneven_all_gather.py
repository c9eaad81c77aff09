"""All-gather and reduce-scatter without pad rows: every rank sees every token, T rows in the order of ranks.

For counts that differ much, on backends with collectives of uneven sizes (see ops/uneven.py): neither buffers nor
experts see a row that is no token. Its shapes follow every count, so it can be captured only while counts are equal.

Symbols: T all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ascend_moe.comm.all_gather import AllGather, AllGatherHandle
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.row_bytes import RowFormat
from vllm_ascend_moe.ops.uneven import exchange_and_sum, uneven_all_gather, uneven_reduce_scatter


class _Handle(AllGatherHandle):
    pass


class UnevenAllGather(AllGather):
    """The strategy for very uneven counts: T rows. See :class:`~vllm_ascend_moe.comm.all_gather.AllGather` for its
    arguments and errors.

    How many ranks HCCL's collectives of uneven sizes take is not checked here, but by whoever chooses the strategy:
    ``Link.uneven_ranks``.
    """

    name = "uneven_allgather"
    handle = _Handle

    def _gather(self, tensors: Sequence[torch.Tensor], layout: TokenLayout, packed: bool) -> list[torch.Tensor]:
        sizes = layout.local_sizes
        if not packed:
            return [uneven_all_gather(x, sizes, self.group) for x in tensors]
        form = RowFormat.of(tensors)
        rows = torch.arange(layout.local_size, device=tensors[0].device)
        return form.views(uneven_all_gather(form.select(tensors, rows), sizes, self.group))

    def _reduce(self, expert_output: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        add = exchange_and_sum if self.exact else uneven_reduce_scatter
        return add(expert_output, layout.local_sizes, self.group)
