"""All-to-all of rows on any group.

Symbols: R ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vllm_ascend_moe.ops.torch_form import Group


def all_to_all(
    group: Group,
    x: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends consecutive blocks of rows to ranks 0..R-1 and returns the blocks they sent here, in rank order.

    Args:
        group: the ranks: with a ``device_group`` of torch.distributed (as TorchGroup and vLLM's groups have), or with
            a method ``all_to_all(x, output_splits, input_splits)``.
        x: [rows, ...] contiguous, in a dtype that every backend sends (bytes always are).
        output_splits: rows that come from each rank; None: as many from each.
        input_splits: rows of ``x`` for each rank; None: rows / R for each.
        out: where the result goes, contiguous; None: a new tensor.

    Returns:
        [sum of output_splits, ...]: ``out``, or a new tensor on groups of torch.distributed.
    """
    process_group: Any = getattr(group, "device_group", None)
    if not isinstance(process_group, dist.ProcessGroup):
        received = group.all_to_all(x, output_splits, input_splits)  # type: ignore[attr-defined]
        return received if out is None else out.copy_(received)
    if out is None:
        rows = x.shape[0] if output_splits is None else sum(output_splits)
        out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x, output_splits, input_splits, group=process_group)
    return out
