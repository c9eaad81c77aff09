"""The strategies of ``comm/``, and torch's bare collectives with the same bytes, as bench_comm.py times them.

What experts would return is made beforehand, so that a layer is a dispatch and a combine.
Symbols: R ranks; T_r tokens of rank r; M max(T_r); C capacity (= M here); H hidden size; K experts a token; E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from comm_methods import NUM_EXPERTS, Bare, Traffic, all_gather

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched, TokenComm
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.comm.payload import QuantizedDispatch
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing.counting_group import CountingGroup

MakeComm = Callable[[Any, Traffic], TokenComm]


def _placement(group: Any) -> ExpertPlacement:
    return ExpertPlacement.linear(NUM_EXPERTS, group.world_size)


def _rows(group: Any, traffic: Traffic) -> TokenComm:
    return AllToAll(group, _placement(group))


def _batched(group: Any, traffic: Traffic) -> TokenComm:
    return BatchedAllToAll(group, _placement(group), max(1, traffic.layout.max_local_size))


def _padded(group: Any, traffic: Traffic) -> TokenComm:
    return PaddedAllGather(group)


def _int8(make: MakeComm) -> MakeComm:
    def made(group: Any, traffic: Traffic) -> TokenComm:
        inner = make(group, traffic)
        return QuantizedDispatch(inner, "int8", dequantize=inner.format is ActivationFormat.ROWS)

    return made


class Ours:
    """One strategy, as the engine uses it.

    ``comm_bytes`` are handed to collectives for other ranks by this rank in a layer, counted in a run of their own.
    """

    def __init__(self, traffic: Traffic, make: MakeComm) -> None:
        self.traffic = traffic
        self.comm = make(TorchGroup(dist.group.WORLD), traffic)
        self.expert_output = self._outputs(self._dispatch(self.comm))
        counting = CountingGroup(TorchGroup(dist.group.WORLD))
        counted = make(counting, traffic)
        counted.combine(self.expert_output, self._dispatch(counted).handle)
        self.comm_bytes = counting.bytes.total()

    def _dispatch(self, comm: TokenComm) -> Dispatched:
        t = self.traffic
        return comm.dispatch(t.hidden, t.weights, t.ids, num_experts=NUM_EXPERTS, layout=t.layout)

    def _outputs(self, sent: Dispatched) -> torch.Tensor:
        """1 for each expert of the row that lives here (ROWS), or for each row (BATCHED): known sums at home."""
        shape, dtype = sent.hidden.shape, self.traffic.hidden.dtype
        if sent.topk_ids is None:
            return torch.ones(shape, dtype=dtype, device=sent.hidden.device)
        rank = self.traffic.layout.rank
        mine = torch.tensor(_placement(TorchGroup(dist.group.WORLD)).experts_of(rank), device=sent.topk_ids.device)
        counts = torch.isin(sent.topk_ids, mine).sum(1, keepdim=True)
        return counts.to(dtype).expand(shape).contiguous()

    def layer(self) -> torch.Tensor:
        return self.comm.combine(self.expert_output, self._dispatch(self.comm).handle)

    def expected(self) -> torch.Tensor:
        """[T_r, H]: K in every element; of batched all-to-all the sum of the weights, which is 1."""
        total = self.traffic.ids.shape[1] if self.comm.format is ActivationFormat.ROWS else 1
        return torch.full_like(self.traffic.hidden, total)


class BareAllToAll:
    """The limit of all-to-all by row: ``all_to_all_single`` of the same rows out and back, with ready buffers and known
    splits; what it lacks is the exchange of counts, packing, and the sum at home."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        group, layout = TorchGroup(dist.group.WORLD), traffic.layout
        owners = torch.tensor(_placement(group).ranks, device=traffic.ids.device)[traffic.ids.long()]
        goes = torch.stack([(owners == rank).any(1) for rank in range(layout.ep_size)])
        send = goes.sum(1)
        every = torch.empty((layout.ep_size, layout.ep_size), dtype=send.dtype, device=send.device)
        all_gather(every, send[None])
        self.send, self.receive = send.tolist(), every[:, layout.rank].tolist()
        row = traffic.row_bytes
        self.out = torch.zeros((sum(self.send), row), dtype=torch.uint8, device=send.device)
        self.expert_output = traffic.hidden.new_zeros((sum(self.receive), traffic.hidden.shape[1]))
        others = sum(self.send) - self.send[layout.rank]
        back = sum(self.receive) - self.receive[layout.rank]
        self.comm_bytes = others * row + back * traffic.hidden.shape[1] * traffic.hidden.element_size()

    def layer(self) -> torch.Tensor:
        arrived = self.out.new_empty((sum(self.receive), self.out.shape[1]))
        dist.all_to_all_single(arrived, self.out, self.receive, self.send)
        home = self.expert_output.new_empty((sum(self.send), self.expert_output.shape[1]))
        dist.all_to_all_single(home, self.expert_output, self.send, self.receive)
        return home


class BareBatched:
    """The limit of batched all-to-all: an all-gather of C rows and an ``all_to_all_single`` of R*C rows with ready
    buffers; what it lacks is packing, the sort by expert, weights, and the sum at home."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        layout, hidden = traffic.layout, traffic.hidden
        self.out = torch.zeros((layout.max_local_size, traffic.row_bytes), dtype=torch.uint8, device=hidden.device)
        self.expert_output = hidden.new_zeros((layout.padded_tokens, hidden.shape[1]))
        row = traffic.row_bytes + hidden.shape[1] * hidden.element_size()
        self.comm_bytes = (layout.ep_size - 1) * layout.max_local_size * row

    def layer(self) -> torch.Tensor:
        arrived = self.out.new_empty((self.traffic.layout.padded_tokens, self.out.shape[1]))
        all_gather(arrived, self.out)
        home = torch.empty_like(self.expert_output)
        dist.all_to_all_single(home, self.expert_output)
        return home


class BarePadded(Bare):
    """See :class:`comm_methods.Bare`."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic)
        self.traffic = traffic
        row = traffic.row_bytes + traffic.hidden.shape[1] * traffic.hidden.element_size()
        self.comm_bytes = (traffic.layout.ep_size - 1) * traffic.layout.max_local_size * row


STRATEGY_METHODS: dict[str, Callable[[Traffic], Any]] = {
    "padded": lambda traffic: Ours(traffic, _padded),
    "padded int8": lambda traffic: Ours(traffic, _int8(_padded)),
    "rows": lambda traffic: Ours(traffic, _rows),
    "rows int8": lambda traffic: Ours(traffic, _int8(_rows)),
    "batched": lambda traffic: Ours(traffic, _batched),
    "batched int8": lambda traffic: Ours(traffic, _int8(_batched)),
    "bare padded": BarePadded,
    "bare rows": BareAllToAll,
    "bare batched": BareBatched,
}
"""By name; each of ours is compared with the bare collectives of the same rows, "bare ..."."""


def bare_of(method: str) -> str:
    """The bare method that a method is compared with."""
    return method if method.startswith("bare") else f"bare {method.split()[0]}"
