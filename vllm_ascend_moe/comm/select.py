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

from vllm_ascend_moe.comm.cost_model import STRATEGIES, Cost, Strategy, cost_of
from vllm_ascend_moe.comm.mc2_limits import PRODUCTS
from vllm_ascend_moe.comm.situation import FORMATS, Situation, mc2_fault, obstacle_to
from vllm_ascend_moe.errors import CapacityError, ConfigError, InvalidValueError, UnsupportedError

__all__ = ["Decision", "DecisionLog", "Situation", "price", "select"]

logger = logging.getLogger(__name__)

ReasonKind = Literal["configured", "cheapest", "smallest", "only choice", "over capacity"]

# Padded all-gather needs neither counts nor buffers: another strategy must beat it by more than the model is worth.
MARGIN = 0.1

# Where an all-gather without pad rows is as fast as the padded one, it is chosen if it saves so many bytes of buffers:
# half of them, and as many as matter.
WORTH_BYTES = 64 << 20


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
        CapacityError: batched_all_to_all is configured, M > C, and over_capacity is "error"; or mc2, and M > its limit.
        InvalidValueError: mc2 is configured and something is out of its limits, or the ranks are no NPUs (ConfigError).
        UnsupportedError: the configured strategy has no experts, or its shapes are not fixed though they must be.
    """
    if not local_sizes:
        raise InvalidValueError("local_sizes", local_sizes, "one count a rank", "Pass TokenLayout.local_sizes.")
    obstacles = {name: obstacle_to(name, local_sizes, situation) for name in STRATEGIES}
    prices = price(local_sizes, situation)
    costs = tuple((name, cost.us) for name, cost in prices.items())
    possible = [name for name in STRATEGIES if obstacles[name] is None]
    chosen, kind, reason = _choose(local_sizes, situation, obstacles, possible, prices)
    rejected = []
    for name in STRATEGIES:
        if name == chosen:
            continue
        why = obstacles[name]
        if why is None and kind in ("cheapest", "smallest"):
            why = f"{prices[name].us:.0f} us by the cost model"
            if prices[name].us < prices[chosen].us:
                why += f", not {MARGIN:.0%} less"
        rejected.append((name, why or f"{situation.comm} is configured"))
    return Decision(chosen, kind, reason, tuple(rejected), costs)


def price(local_sizes: tuple[int, ...], situation: Situation) -> dict[Strategy, Cost]:
    """The cost of each strategy; of batched_all_to_all only where there is a capacity, of mc2 only between NPUs."""
    packed = max(local_sizes) * situation.shape.dispatch_bytes <= situation.packed_bytes
    return {
        name: cost_of(name, local_sizes, situation.shape, situation.link, situation.capacity, packed)
        for name in STRATEGIES
        if (name != "batched_all_to_all" or situation.capacity is not None)
        and (name != "mc2" or situation.link.name in PRODUCTS)
    }


def _choose(
    sizes: tuple[int, ...],
    situation: Situation,
    obstacles: dict[Strategy, str | None],
    possible: list[Strategy],
    prices: dict[Strategy, Cost],
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
    favoured = {name: prices[name].us * (1 - MARGIN if name == "padded_allgather" else 1) for name in possible}
    best = min(possible, key=favoured.__getitem__)
    if best == "padded_allgather" and "uneven_allgather" in possible:
        padded, uneven = prices[best], prices["uneven_allgather"]
        saved = padded.memory_bytes - uneven.memory_bytes
        if uneven.us <= padded.us and saved >= max(WORTH_BYTES, uneven.memory_bytes):
            small, large = uneven.memory_bytes >> 20, padded.memory_bytes >> 20
            return "uneven_allgather", "smallest", f"as fast as {best}, with {small} MiB of buffers instead of {large}"
    return best, "cheapest", f"{prices[best].us:.0f} us by the cost model on {situation.link.name}"


def _configured(
    comm: Strategy, sizes: tuple[int, ...], situation: Situation, obstacles: dict[Strategy, str | None]
) -> tuple[Strategy, ReasonKind, str]:
    obstacle = obstacles[comm]
    if obstacle is None:
        return comm, "configured", f"comm = {comm!r}"
    if FORMATS[comm] not in situation.formats:
        raise UnsupportedError(f'comm = {comm!r} is configured, but {obstacle}. Choose comm = "auto".')
    fault = _configured_fault(comm, sizes, situation)
    if fault is None:
        raise UnsupportedError(
            f'comm = {comm!r} is configured, but {obstacle}. Choose "auto"; with captured graphs "batched_all_to_all".'
        )
    if isinstance(fault, CapacityError) and situation.over_capacity == "rows" and obstacles["all_to_all"] is None:
        return "all_to_all", "over capacity", obstacle
    raise fault


def _configured_fault(comm: Strategy, sizes: tuple[int, ...], situation: Situation) -> InvalidValueError | None:
    """Of a strategy with limits of its own, the error to raise."""
    if comm == "mc2":
        return mc2_fault(max(sizes), len(sizes), situation)
    if comm != "batched_all_to_all":
        return None
    capacity = situation.capacity
    if capacity is None:
        return ConfigError("capacity", None, f"set for comm = {comm!r}", "Set the most tokens of a rank in a forward.")
    action = 'Raise the capacity, schedule fewer tokens, or set over_capacity = "rows".'
    return CapacityError("max(local_sizes)", max(sizes), f"at most capacity = {capacity}", action)


class DecisionLog:
    """Logs a decision once per strategy and kind of reason, so that a server's log stays readable."""

    def __init__(self) -> None:
        self._seen: set[tuple[Strategy, ReasonKind]] = set()

    def __call__(self, decision: Decision) -> None:
        key = (decision.strategy, decision.kind)
        if key not in self._seen:
            self._seen.add(key)
            logger.info("Token communication: %s", decision)
