"""A group that counts the bytes its collectives are given for other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from vllm_ascend_moe.ops.exchange import all_to_all
from vllm_ascend_moe.ops.native import TorchGroup


class CountingGroup:
    """:class:`~vllm_ascend_moe.ops.native.Group` over another; native code cannot find it, so that plain torch runs.

    ``bytes`` and ``calls`` are by operation since the last :meth:`reset`. Counted is what this rank has for others, as
    an algorithm without forwarding sends it: an all-gather's input R-1 times, of the others all but its own part.
    """

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self.world_size, self.rank_in_group = group.world_size, group.rank_in_group
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def reset(self) -> None:
        """Begins to count anew."""
        self.bytes.clear()
        self.calls.clear()

    def _count(self, op: str, elements: int, x: torch.Tensor) -> None:
        self.calls[op] += 1
        self.bytes[op] += elements * x.element_size()

    def all_gather(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[n, ...] -> [R*n, ...]."""
        self._count("all_gather", input_.numel() * (self.world_size - 1), input_)
        return self._group.all_gather(input_, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[R*n, ...] -> [n, ...]."""
        self._count("reduce_scatter", input_.numel() // self.world_size * (self.world_size - 1), input_)
        return self._group.reduce_scatter(input_, dim)

    def all_to_all(
        self, x: torch.Tensor, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None
    ) -> torch.Tensor:
        """See :func:`vllm_ascend_moe.ops.exchange.all_to_all`."""
        own = x.shape[0] // self.world_size if input_splits is None else input_splits[self.rank_in_group]
        self._count("all_to_all", x[own:].numel(), x)
        return all_to_all(self._group, x, output_splits, input_splits)
