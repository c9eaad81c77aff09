"""The ways of moving one MoE layer's tokens that bench_comm.py compares. Each dispatches hidden, weights and ids and
combines expert outputs; what experts would return is made beforehand, in the row order of the method.

Symbols: R ranks; T_r tokens of rank r; M = max(T_r); H hidden size; K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.base import Dispatched
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup

NUM_EXPERTS = 256

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Traffic:
    """One layer's tensors on this rank."""

    layout: TokenLayout
    hidden: torch.Tensor  # bf16 [T_r, H]
    weights: torch.Tensor  # fp32 [T_r, K]
    ids: torch.Tensor  # int32 [T_r, K]

    @staticmethod
    def make(sizes: list[int], rank: int, hidden_size: int, top_k: int, device: torch.device) -> Traffic:
        generator = torch.Generator().manual_seed(rank)
        tokens = sizes[rank]
        # Small whole numbers: sums over ranks are exact in bf16, so methods can be compared bit by bit.
        hidden = torch.randint(-8, 9, (tokens, hidden_size), generator=generator).to(torch.bfloat16)
        weights = torch.full((tokens, top_k), 1 / top_k)
        # The K largest of E random numbers: distinct experts, all equally likely.
        ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(top_k, dim=1).indices.int()
        return Traffic(TokenLayout.of(sizes, rank), hidden.to(device), weights.to(device), ids.to(device))

    @property
    def row_bytes(self) -> int:
        """Of one token in all three tensors."""
        return sum(x.element_size() * x.shape[1] for x in (self.hidden, self.weights, self.ids))


class PlainGroup:
    """A group that native code cannot find, so that the plain torch form runs."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self.world_size, self.rank_in_group = group.world_size, group.rank_in_group

    def all_gather(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._group.all_gather(input_, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._group.reduce_scatter(input_, dim)


class Padded:
    """Ours: :class:`PaddedAllGather`, as the engine uses it."""

    def __init__(self, traffic: Traffic, *, native: bool = True, packed_bytes: int | None = None) -> None:
        group = TorchGroup(dist.group.WORLD)
        kwargs = {} if packed_bytes is None else {"packed_bytes": packed_bytes}
        self.comm = PaddedAllGather(group if native else PlainGroup(group), **kwargs)
        self.traffic = traffic
        self.expert_output = self._dispatch().hidden.contiguous()

    def _dispatch(self) -> Dispatched:
        t = self.traffic
        return self.comm.dispatch(t.hidden, t.weights, t.ids, num_experts=NUM_EXPERTS, layout=t.layout)

    def layer(self) -> torch.Tensor:
        return self.comm.combine(self.expert_output, self._dispatch().handle)


class UnpadRepack:
    """The baseline: pad, gather, cut the pad out with slices and a cat, for each tensor; before the reduce-scatter copy
    every rank's rows into a new zeroed buffer."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.expert_output = self._dispatch()[0].contiguous()

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        layout = self.traffic.layout
        rows, ranks = layout.max_local_size, layout.ep_size
        if x.shape[0] < rows:
            x = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
        out = x.new_empty((ranks * rows, *x.shape[1:]))
        all_gather(out, x)
        return torch.cat([out[r * rows : r * rows + size] for r, size in enumerate(layout.local_sizes)])

    def _dispatch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        t = self.traffic
        return self._gather(t.hidden), self._gather(t.weights), self._gather(t.ids)

    def layer(self) -> torch.Tensor:
        self._dispatch()
        layout, x = self.traffic.layout, self.expert_output
        rows = layout.max_local_size
        padded = x.new_zeros((layout.ep_size * rows, *x.shape[1:]))
        start = 0
        for r, size in enumerate(layout.local_sizes):
            padded[r * rows : r * rows + size].copy_(x[start : start + size])
            start += size
        out = x.new_empty((rows, *x.shape[1:]))
        _reduce(out, padded)
        return out[: layout.local_size]


class Uneven:
    """Collectives of unequal parts, as vLLM's all_gatherv and reduce_scatterv; not every backend has them."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.expert_output = self._gather(traffic.hidden)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        sizes = list(self.traffic.layout.local_sizes)
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        dist.all_gather(list(out.split(sizes)), x)
        return out

    def layer(self) -> torch.Tensor:
        t = self.traffic
        for x in (t.hidden, t.weights, t.ids):
            self._gather(x)
        out = torch.empty_like(t.hidden)
        dist.reduce_scatter(out, list(self.expert_output.split(list(t.layout.local_sizes))))
        return out


class BarePacked:
    """The limit of packing: one gather of ready rows of bytes and one reduce-scatter; only outputs are allocated."""

    def __init__(self, traffic: Traffic) -> None:
        layout = traffic.layout
        self.layout = layout
        rows, row_bytes = layout.max_local_size, traffic.row_bytes
        self.wire = torch.zeros(rows, row_bytes, dtype=torch.uint8, device=traffic.hidden.device)
        self.expert_output = Bare(traffic).expert_output

    def layer(self) -> torch.Tensor:
        rows = self.layout.max_local_size
        out = self.wire.new_empty((self.layout.ep_size * rows, self.wire.shape[1]))
        all_gather(out, self.wire)
        reduced = self.expert_output.new_empty((rows, self.expert_output.shape[1]))
        _reduce(reduced, self.expert_output)
        return reduced


class Bare:
    """The limit of separate tensors: three gathers and a reduce-scatter of ready, padded buffers."""

    def __init__(self, traffic: Traffic) -> None:
        layout = traffic.layout
        self.layout = layout
        self.inputs = []
        for x in (traffic.hidden, traffic.weights, traffic.ids):
            padded = x.new_zeros((layout.max_local_size, *x.shape[1:]))
            padded[: x.shape[0]] = x
            self.inputs.append(padded)
        self.expert_output = self._gather(self.inputs[0])

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.layout.ep_size * x.shape[0], *x.shape[1:]))
        all_gather(out, x)
        return out

    def layer(self) -> torch.Tensor:
        for x in self.inputs:
            self._gather(x)
        out = self.expert_output.new_empty((self.layout.max_local_size, *self.expert_output.shape[1:]))
        _reduce(out, self.expert_output)
        return out
