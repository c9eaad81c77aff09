"""All ranks of a group in one process: each rank is a thread, each collective a meeting of the threads.

What it proves: data and shapes of collectives, that every rank enters every collective with the same operation, dtype
and row shape, and that inputs are contiguous (which gloo does not need but NCCL and HCCL do). On one rank a collective
returns its input, as vLLM's group does, so that an operator that passes it on is found out. What it does not prove:
anything about a real backend, its streams or its speed; the multi-process tests do that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")
_MEETING_TIMEOUT_S = 30.0


class MissedMeetingError(AssertionError):
    """A rank waits in a collective that another rank will not enter."""


@dataclass(frozen=True)
class Call:
    """One collective as a rank entered it."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Meeting:
    """Exchanges one tensor per rank, all to all, as often as the ranks meet."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._changed = threading.Condition()
        self._entered: dict[int, tuple[Call, torch.Tensor]] = {}
        self._left: set[int] = set()

    def leave(self, rank: int) -> None:
        """Says that this rank ended, by its last line or by an error, so that nobody waits for it."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def exchange(self, rank: int, call: Call, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of all ranks, in rank order."""
        with self._changed:
            entered = self._entered
            # A copy: a rank may write to its tensor as soon as it has returned, before the others have read it.
            entered[rank] = (call, tensor.clone())
            if len(entered) == self._world_size:
                self._entered = {}
                self._changed.notify_all()
            while len(entered) < self._world_size:
                if self._left or not self._changed.wait(_MEETING_TIMEOUT_S):
                    missing = sorted(set(range(self._world_size)) - set(entered))
                    raise MissedMeetingError(f"rank {rank} waits in {call}, but ranks {missing} do not enter it")
        calls = [entered[other][0] for other in range(self._world_size)]
        if len(set(calls)) != 1:
            raise AssertionError(f"ranks entered different collectives: {calls}")
        return [entered[other][1] for other in range(self._world_size)]


class FakeGroup:
    """One rank's view of the group; the interface of :class:`vllm_ascend_moe.ops.native.Group`."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank_in_group = rank
        self.world_size = world_size
        self.calls: list[Call] = []
        self._meeting = meeting

    def _enter(self, op: str, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        if dim != 0:
            raise AssertionError(f"{op}: only dim 0 is used in the padded layout, got {dim}")
        if not x.is_contiguous():
            raise AssertionError(f"{op}: input with strides {x.stride()} is not contiguous")
        call = Call(op, tuple(x.shape), x.dtype)
        self.calls.append(call)
        return self._meeting.exchange(self.rank_in_group, call, x)

    def all_gather(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[n, ...] -> [R*n, ...]."""
        parts = self._enter("all_gather", input_, dim)
        return input_ if self.world_size == 1 else torch.cat(parts)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[R*n, ...] -> [n, ...], summed in rank order."""
        if input_.shape[0] % self.world_size:
            raise AssertionError(f"reduce_scatter: {input_.shape[0]} rows do not divide by {self.world_size}")
        parts = [x.chunk(self.world_size)[self.rank_in_group] for x in self._enter("reduce_scatter", input_, dim)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return input_ if self.world_size == 1 else total

    def all_to_all(
        self, x: torch.Tensor, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None
    ) -> torch.Tensor:
        """See :func:`vllm_ascend_moe.ops.exchange.all_to_all`; refuses splits on which two ranks do not agree."""
        equal = [x.shape[0] // self.world_size] * self.world_size
        sent, wanted = (list(equal if splits is None else splits) for splits in (input_splits, output_splits))
        if sum(sent) != x.shape[0] or not x.is_contiguous():
            raise AssertionError(f"all_to_all: splits {sent} of {x.shape[0]} rows, strides {x.stride()}")
        self.calls.append(Call("all_to_all", tuple(x.shape), x.dtype))
        # Numbers of rows differ between ranks, and may.
        splits = self._meeting.exchange(
            self.rank_in_group, Call("all_to_all", tuple(x.shape[1:]), x.dtype), torch.tensor(sent)
        )
        coming = [int(of_rank[self.rank_in_group]) for of_rank in splits]
        if coming != wanted:
            raise AssertionError(f"all_to_all: rank {self.rank_in_group} expects {wanted} rows, {coming} come")
        rows = self._meeting.exchange(self.rank_in_group, Call("rows", (), x.dtype), x)
        blocks = [part.split(of_rank.tolist())[self.rank_in_group] for part, of_rank in zip(rows, splits, strict=True)]
        return x if self.world_size == 1 else torch.cat(blocks)


@dataclass(frozen=True)
class RankGroups:
    """The groups one rank belongs to. Rank order is DP, then PCP, then TP: ``(dp * PCP + pcp) * TP + tp``."""

    ep: FakeGroup
    dp: FakeGroup
    pcp: FakeGroup
    tp: FakeGroup


def run_topology(
    body: Callable[[RankGroups], Result], *, dp_size: int = 1, pcp_size: int = 1, tp_size: int = 1
) -> list[Result]:
    """Runs ``body(groups)`` on every rank of DP x PCP x TP at once; returns the results by EP rank.

    Raises:
        Exception: the first error of any rank (the others are freed from their meetings).
    """
    world_size = dp_size * pcp_size * tp_size
    meetings: dict[tuple[object, ...], _Meeting] = {}
    ranks: list[RankGroups] = []
    for rank in range(world_size):
        outer, tp = divmod(rank, tp_size)
        dp, pcp = divmod(outer, pcp_size)

        def group(rank_in_group: int, size: int, *key: object) -> FakeGroup:
            return FakeGroup(rank_in_group, size, meetings.setdefault(key, _Meeting(size)))

        ranks.append(
            RankGroups(
                ep=group(rank, world_size, "ep"),
                dp=group(dp, dp_size, "dp", pcp, tp),
                pcp=group(pcp, pcp_size, "pcp", dp, tp),
                tp=group(tp, tp_size, "tp", dp, pcp),
            )
        )

    def one(groups: RankGroups) -> Result:
        try:
            return body(groups)
        finally:
            for group in (groups.ep, groups.dp, groups.pcp, groups.tp):
                group._meeting.leave(group.rank_in_group)

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, groups) for groups in ranks]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # A missed meeting is often only the echo of another rank's error.
    for error in sorted(errors, key=lambda error: isinstance(error, MissedMeetingError)):
        raise error
    return [future.result() for future in futures]


def run_ranks(world_size: int, body: Callable[[int, FakeGroup], Result]) -> list[Result]:
    """Runs ``body(rank, group)`` on every rank of one group at once; see :func:`run_topology`."""
    return run_topology(lambda groups: body(groups.ep.rank_in_group, groups.ep), dp_size=world_size)
