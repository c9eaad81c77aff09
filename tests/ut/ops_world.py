"""A forward on all ranks of a topology in one process, for tests of the two operators.

The ranks are threads over hand-written groups (vllm_ascend_moe.testing.fake_group); the module-level names that
register_custom_ops.py imports from vLLM are patched with each thread's own context and groups. The operators are
called through the dispatcher, so on the real registrations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.forward_context import DPMetadata, ForwardContext

import vllm_ascend_moe.ops.register_custom_ops as ops
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY, ForwardLayouts
from vllm_ascend_moe.testing.fake_group import RankGroups, run_topology

GATHER_FAKE = ops._maybe_all_gather_and_maybe_unpad_fake
REDUCE_FAKE = ops._maybe_pad_and_reduce_fake


def gather(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.vllm.maybe_all_gather_and_maybe_unpad(x)


def reduce(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.vllm.maybe_pad_and_reduce(x)


def context(dp_metadata: Any = None, **additional: Any) -> ForwardContext:
    """vLLM's own ForwardContext; a wrong field name is an error."""
    return ForwardContext({}, {}, {}, dp_metadata=dp_metadata, additional_kwargs=additional)


def layout_context(sizes: list[int], rank: int, group: str = "ep") -> ForwardContext:
    """A context with one layout, as our platform puts it there."""
    layouts = ForwardLayouts(by_group={group: TokenLayout.of(sizes, rank)}, active=group)
    return context(**{FORWARD_LAYOUTS_KEY: layouts})


@dataclass
class World:
    """The topology under test and how each rank's context is made."""

    local: threading.local
    dp_size: int = 1
    pcp_size: int = 1
    tp_size: int = 1
    calls: list[list[str]] = field(default_factory=list)

    def sized(self, *, dp: int = 1, pcp: int = 1, tp: int = 1) -> World:
        self.dp_size, self.pcp_size, self.tp_size = dp, pcp, tp
        return self

    def run(self, make_context: Callable[[RankGroups], Any], body: Callable[[RankGroups], Any]) -> list[Any]:
        """``body(groups)`` on every rank with its context; results by EP rank. Fills ``calls`` by EP rank."""

        def one(groups: RankGroups) -> Any:
            self.local.groups, self.local.context = groups, make_context(groups)
            result = body(groups)
            return result, [call.op for group in (groups.ep, groups.dp, groups.pcp, groups.tp) for call in group.calls]

        done = run_topology(one, dp_size=self.dp_size, pcp_size=self.pcp_size, tp_size=self.tp_size)
        self.calls = [calls for _, calls in done]
        return [result for result, _ in done]

    def run_layout(self, sizes: list[int], body: Callable[[RankGroups], Any]) -> list[Any]:
        """One EP rank per size, with the layout in the forward context."""
        self.sized(dp=len(sizes))
        return self.run(lambda groups: layout_context(sizes, groups.ep.rank_in_group), body)


def make_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A World whose contexts and groups the operators see; the fixture ``world`` of conftest.py."""
    ops.register_custom_ops()
    local = threading.local()
    monkeypatch.setattr(ops, "get_forward_context", lambda: local.context)
    for name in ("ep", "dp", "pcp"):
        monkeypatch.setattr(ops, f"get_{name}_group", lambda name=name: getattr(local.groups, name))
    return World(local)


def dp_metadata(counts: list[int]) -> DPMetadata:
    return DPMetadata(torch.tensor(counts, dtype=torch.int32))
