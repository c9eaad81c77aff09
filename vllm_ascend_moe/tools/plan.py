"""Which strategy a forward would get, and what each costs: the command ``plan``. Needs no group and no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_moe.comm.cost_model import STRATEGIES, Cost, Strategy
from vllm_ascend_moe.comm.select import Decision, Situation, price, select
from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.layout import TokenLayout

HEADS = ("strategy", "", "collectives", "host waits", "out", "back", "between nodes", "memory", "time")


@dataclass(frozen=True)
class Plan:
    """One forward: what was decided, and the costs of every strategy that could be priced."""

    local_sizes: tuple[int, ...]
    situation: Situation
    decision: Decision
    costs: dict[Strategy, Cost]


def local_sizes(tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """T_r of every rank: as given, or one count for each of ``ranks`` ranks.

    Raises:
        LayoutError: a count below 0. InvalidValueError: fewer than 1 rank, or another number of ranks than of counts.
    """
    if ranks < 1:
        raise InvalidValueError("ranks", ranks, "1 or more", "Pass the size of the group.")
    if len(tokens) > 1 and ranks not in (1, len(tokens)):
        raise InvalidValueError("ranks", ranks, f"{len(tokens)}, as many as counts", "Pass one count for all, or each.")
    return TokenLayout.of(list(tokens) * ranks if len(tokens) == 1 else tokens, 0).local_sizes


def make_plan(local_sizes: tuple[int, ...], situation: Situation) -> Plan:
    """Raises what :func:`~vllm_ascend_moe.comm.select.select` raises."""
    return Plan(local_sizes, situation, select(local_sizes, situation), price(local_sizes, situation))


def render(plan: Plan) -> str:
    """The decision, the reasons, and a table of bytes a rank, memory and time, as text."""
    decision, shape, link = plan.decision, plan.situation.shape, plan.situation.link
    sizes = plan.local_sizes
    lines = [
        f"{decision.strategy} ({decision.kind}: {decision.reason})",
        *(f"  not {name}: {reason}" for name, reason in decision.rejected),
        "",
        *_table([_row(name, plan) for name in STRATEGIES if name in plan.costs]),
        "",
        f"{sum(sizes)} tokens on {len(sizes)} ranks, at most {max(sizes)} on one; a token is {shape.dispatch_bytes} "
        f"bytes on its way out and {shape.return_bytes} on its way back.",
        "Bytes are those of the rank that sends or receives most in a layer; of all_to_all they are expected ones, "
        "with experts equally likely.",
        "Memory: buffers of dispatch, experts and combine, at most. Time: a model, to compare strategies with.",
        f"Link {link.name}: {link.source}.",
    ]
    return "\n".join(lines)


def _row(name: Strategy, plan: Plan) -> tuple[str, ...]:
    cost = plan.costs[name]
    return (
        name,
        "<- chosen" if name == plan.decision.strategy else "",
        str(cost.collectives),
        str(cost.syncs),
        human_bytes(cost.dispatch_bytes),
        human_bytes(cost.combine_bytes),
        human_bytes(cost.node_bytes),
        human_bytes(cost.memory_bytes),
        f"{cost.us:.0f} us",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Left-aligned names, right-aligned figures."""
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    lines = []
    for row in (HEADS, *rows):
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def human_bytes(count: int) -> str:
    """In the largest binary unit that leaves 1 or more.

    >>> human_bytes(900), human_bytes(2048), human_bytes(3 << 29)
    ('900 B', '2.0 KiB', '1.5 GiB')
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
