"""Which passes a layer's tokens take to their experts and back, and with which strategy each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from vllm_ascend_moe.comm.cost_model import Strategy
from vllm_ascend_moe.comm.select import DecisionLog, Situation, select
from vllm_ascend_moe.layout import TokenLayout

_log_once = DecisionLog()


@dataclass(frozen=True)
class Pass:
    """Some of a layer's tokens, all of them where nothing bounds their number."""

    strategy: Strategy
    layout: TokenLayout
    rows: slice
    """This rank's tokens of the pass."""


class PassPlanner:
    """The passes of each layout, the same on every rank, since nothing but what all ranks share decides.

    Args:
        situation: what does not change from forward to forward.
        max_tokens: tokens of one rank in a pass at most; None: no bound.
    """

    def __init__(self, situation: Situation, max_tokens: int | None) -> None:
        self.situation = situation
        self.max_tokens = max_tokens
        self._last: tuple[TokenLayout, tuple[Pass, ...]] | None = None

    def passes(self, layout: TokenLayout) -> tuple[Pass, ...]:
        """At least one pass, also where no rank has a token.

        Raises:
            CapacityError: more tokens than the capacity, on every rank alike. And what else ``select`` raises.
        """
        # All layers of a forward ask with the same object, and share this one.
        last = self._last
        if last is None or last[0] is not layout:
            last = self._last = layout, self._plan(layout)
        return last[1]

    def _plan(self, layout: TokenLayout) -> tuple[Pass, ...]:
        parts = (layout,) if self.max_tokens is None else layout.chunks(self.max_tokens)
        passes, start = [], 0
        for part in parts:
            decision = select(part.local_sizes, self.situation)
            _log_once(decision)
            passes.append(Pass(decision.strategy, part, slice(start, start + part.local_size)))
            start += part.local_size
        return tuple(passes)


@lru_cache(maxsize=16)
def planner(situation: Situation, max_tokens: int | None) -> PassPlanner:
    """One planner for all layers of the same situation."""
    return PassPlanner(situation, max_tokens)
