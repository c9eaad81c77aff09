"""Which strategy moves the tokens of a forward, and why.

A pure function of values that all ranks share (token counts of every rank, the model's sizes, the configuration): it
never sees which rank asks, so that all ranks decide alike. See cost_model.py for what is compared.

Symbols: T_r tokens of rank r; R ranks; M max(T_r); C capacity.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from vllm_ascend_moe.comm.base import ActivationFormat
from vllm_ascend_moe.comm.cost_model import STRATEGIES, Cost, MoEShape, Strategy, cost_of
from vllm_ascend_moe.comm.links import LINKS, Link
from vllm_ascend_moe.comm.padded_all_gather import DEFAULT_PACKED_BYTES
from vllm_ascend_moe.errors import CapacityError, ConfigError, InvalidValueError, UnsupportedError

logger = logging.getLogger(__name__)

ReasonKind = Literal["configured", "cheapest", "only choice", "over capacity"]

# Padded all-gather needs neither counts nor buffers: another strategy must beat it by more than the model is worth.
MARGIN = 0.1

FORMATS: dict[Strategy, ActivationFormat] = {
    "padded_allgather": ActivationFormat.ROWS,
    "all_to_all": ActivationFormat.ROWS,
    "batched_all_to_all": ActivationFormat.BATCHED,
}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What does not change from forward to forward, the same on every rank.

    Args:
        shape: sizes of the MoE layer.
        link: between ranks.
        comm: "auto", or the strategy the configuration asks for.
        capacity: C of batched_all_to_all, tokens a rank; None: it was not agreed on.
        over_capacity: when the configuration asks for batched_all_to_all and M > C: "error" or "rows" (all_to_all).
        fixed_shapes: the forward is captured or its shapes must not depend on other ranks' token counts.
        formats: for which experts exist.
        packed_bytes: of PaddedAllGather.
    """

    shape: MoEShape
    link: Link = LINKS["gloo"]
    comm: Strategy | Literal["auto"] = "auto"
    capacity: int | None = None
    over_capacity: Literal["error", "rows"] = "error"
    fixed_shapes: bool = False
    formats: tuple[ActivationFormat, ...] = tuple(ActivationFormat)
    packed_bytes: int = DEFAULT_PACKED_BYTES

    def __post_init__(self) -> None:
        if self.comm != "auto" and self.comm not in STRATEGIES:
            raise ConfigError("comm", self.comm, f"auto or one of {', '.join(STRATEGIES)}", "Choose one of them.")
        if self.capacity is not None and self.capacity < 1:
            raise InvalidValueError("capacity", self.capacity, "1 or more, or None", "Pass the most tokens of a rank.")


@dataclass(frozen=True)
class Decision:
    """A strategy and why.

    ``rejected`` holds (strategy, reason) of the others; ``costs`` microseconds of every strategy that could be priced.
    """

    strategy: Strategy
    kind: ReasonKind
    reason: str
    rejected: tuple[tuple[Strategy, str], ...]
    costs: tuple[tuple[Strategy, float], ...]

    def __str__(self) -> str:
        others = "; ".join(f"not {name}: {reason}" for name, reason in self.rejected)
        return f"{self.strategy}, {self.kind}: {self.reason}" + (f" ({others})" if others else "")


@lru_cache(maxsize=4096)
def select(local_sizes: tuple[int, ...], situation: Situation) -> Decision:
    """Chooses the strategy of one forward. Cached, so that asking again for the same counts costs a look-up.

    Args:
        local_sizes: T_r of every rank (``TokenLayout.local_sizes``).
        situation: everything else.

    Returns:
        The decision, the same on every rank.

    Raises:
        ConfigError: batched_all_to_all is configured and there is no capacity; or shapes must be fixed and no strategy
            has fixed ones.
        CapacityError: batched_all_to_all is configured, M > C, and over_capacity is "error".
        UnsupportedError: the configured strategy has no experts, or its shapes are not fixed though they must be.
    """
    if not local_sizes:
        raise InvalidValueError("local_sizes", local_sizes, "one count a rank", "Pass TokenLayout.local_sizes.")
    obstacles = {name: _obstacle(name, local_sizes, situation) for name in STRATEGIES}
    prices = price(local_sizes, situation)
    costs = tuple((name, cost.us) for name, cost in prices.items())
    possible = [name for name in STRATEGIES if obstacles[name] is None]
    chosen, kind, reason = _choose(local_sizes, situation, obstacles, possible, dict(costs))
    rejected = []
    for name in STRATEGIES:
        if name == chosen:
            continue
        why = obstacles[name]
        if why is None and kind == "cheapest":
            why = f"{prices[name].us:.0f} us by the cost model"
            if prices[name].us < prices[chosen].us:
                why += f", not {MARGIN:.0%} less"
        rejected.append((name, why or f"{situation.comm} is configured"))
    return Decision(chosen, kind, reason, tuple(rejected), costs)


def price(local_sizes: tuple[int, ...], situation: Situation) -> dict[Strategy, Cost]:
    """The cost of each strategy; of batched_all_to_all only where there is a capacity."""
    packed = max(local_sizes) * situation.shape.dispatch_bytes <= situation.packed_bytes
    return {
        name: cost_of(name, local_sizes, situation.shape, situation.link, situation.capacity, packed)
        for name in STRATEGIES
        if name != "batched_all_to_all" or situation.capacity is not None
    }


def _choose(
    sizes: tuple[int, ...],
    situation: Situation,
    obstacles: dict[Strategy, str | None],
    possible: list[Strategy],
    costs: dict[Strategy, float],
) -> tuple[Strategy, ReasonKind, str]:
    if situation.comm != "auto":
        return _configured(situation.comm, sizes, situation, obstacles)
    if not possible:
        raise ConfigError(
            "capacity",
            situation.capacity,
            f"at least the {max(sizes)} tokens of the fullest rank, with batched experts",
            "Fixed shapes with uneven token counts need batched_all_to_all: set a capacity, or run without capture.",
        )
    if len(possible) == 1:
        return possible[0], "only choice", "no other strategy is possible"
    favoured = {name: costs[name] * (1 - MARGIN if name == "padded_allgather" else 1) for name in possible}
    best = min(possible, key=favoured.__getitem__)
    return best, "cheapest", f"{costs[best]:.0f} us by the cost model on {situation.link.name}"


def _configured(
    comm: Strategy, sizes: tuple[int, ...], situation: Situation, obstacles: dict[Strategy, str | None]
) -> tuple[Strategy, ReasonKind, str]:
    obstacle = obstacles[comm]
    if obstacle is None:
        return comm, "configured", f"comm = {comm!r}"
    if FORMATS[comm] not in situation.formats:
        raise UnsupportedError(f'comm = {comm!r} is configured, but {obstacle}. Choose comm = "auto".')
    if comm != "batched_all_to_all":
        raise UnsupportedError(
            f'comm = {comm!r} is configured, but {obstacle}. Choose "batched_all_to_all", or run without capture.'
        )
    if situation.capacity is None:
        raise ConfigError("capacity", None, f"set for comm = {comm!r}", "Set the most tokens of a rank in a forward.")
    if situation.over_capacity == "rows" and obstacles["all_to_all"] is None:
        return "all_to_all", "over capacity", obstacle
    raise CapacityError(
        "max(local_sizes)",
        max(sizes),
        f"at most capacity = {situation.capacity}",
        'Raise the capacity, schedule fewer tokens, or set over_capacity = "rows".',
    )


def _obstacle(name: Strategy, sizes: tuple[int, ...], situation: Situation) -> str | None:
    """Why a strategy cannot be used at all in this forward, or None."""
    most, capacity = max(sizes), situation.capacity
    if FORMATS[name] not in situation.formats:
        return f"there are no experts of the {FORMATS[name].value} format"
    if name == "batched_all_to_all":
        if capacity is None:
            return "no capacity was agreed on"
        return f"{most} tokens on a rank, capacity {capacity}" if most > capacity else None
    if not situation.fixed_shapes:
        return None
    if name == "all_to_all":
        return "its shapes follow the routing, and shapes must be fixed"
    return None if min(sizes) == most else "its shapes follow uneven token counts, and shapes must be fixed"


class DecisionLog:
    """Logs a decision once per strategy and kind of reason, so that a server's log stays readable."""

    def __init__(self) -> None:
        self._seen: set[tuple[Strategy, ReasonKind]] = set()

    def __call__(self, decision: Decision) -> None:
        key = (decision.strategy, decision.kind)
        if key not in self._seen:
            self._seen.add(key)
            logger.info("Token communication: %s", decision)
