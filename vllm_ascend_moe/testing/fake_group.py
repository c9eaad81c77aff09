"""All ranks of a group in one process: each rank is a thread, each collective a meeting of the threads.

What it proves: data and shapes of collectives, that every rank enters every collective with the same operation, dtype
and row shape, and that inputs are contiguous (which gloo does not need but NCCL and HCCL do). What it does not prove:
anything about a real backend, its streams or its speed; the multi-process tests do that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")
_MEETING_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Call:
    """One collective as a rank entered it."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Meeting:
    """Exchanges one object per rank, all to all."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.slots: list[tuple[Call, torch.Tensor] | None] = [None] * world_size

    def exchange(self, rank: int, call: Call, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.slots[rank] = (call, tensor)
        self.barrier.wait(_MEETING_TIMEOUT_S)
        entered = [slot for slot in self.slots if slot is not None]
        self.barrier.wait(_MEETING_TIMEOUT_S)
        if len({other for other, _ in entered}) != 1:
            raise AssertionError(f"ranks entered different collectives: {[other for other, _ in entered]}")
        return [other for _, other in entered]


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
        return torch.cat(self._enter("all_gather", input_, dim))

    def reduce_scatter(self, input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """[R*n, ...] -> [n, ...], summed in rank order."""
        if input_.shape[0] % self.world_size:
            raise AssertionError(f"reduce_scatter: {input_.shape[0]} rows do not divide by {self.world_size}")
        parts = [x.chunk(self.world_size)[self.rank_in_group] for x in self._enter("reduce_scatter", input_, dim)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def run_ranks(world_size: int, body: Callable[[int, FakeGroup], Result]) -> list[Result]:
    """Runs ``body(rank, group)`` on every rank at once; returns the results by rank.

    Raises:
        Exception: the first error of any rank (the others are freed from their meeting).
    """
    meeting = _Meeting(world_size)

    def one(rank: int) -> Result:
        try:
            return body(rank, FakeGroup(rank, world_size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
    errors = [future.exception() for future in futures]
    # A broken barrier is only the echo of another rank's error.
    real = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    for error in real or [error for error in errors if error is not None]:
        raise error
    return [future.result() for future in futures]
