"""Reads the folder that ASCEND_MOE_TRACE names and sums it up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.layout import TokenLayout


@dataclass(frozen=True)
class LayerStep:
    """One MoE layer in one step on one rank, as the trace has it."""

    layer: str
    group: str | None
    rank: int | None
    local_sizes: tuple[int, ...] | None
    collectives: tuple[tuple[str, int], ...]
    strategies: tuple[str, ...] = ()
    """Of each pass of the layer's tokens; none where nothing of ours communicated."""

    def layout(self) -> TokenLayout | None:
        """The layer's layout, or None where nothing was communicated."""
        if self.local_sizes is None or self.rank is None:
            return None
        return TokenLayout.of(self.local_sizes, self.rank)


def read_trace(folder: Path) -> list[LayerStep]:
    """Every line of every file in the folder.

    Raises:
        InvalidValueError: no trace files are there.
    """
    files = sorted(folder.glob("moe-*.jsonl"))
    if not files:
        raise InvalidValueError(
            "folder", str(folder), "one with moe-*.jsonl files", "Run the engine with ASCEND_MOE_TRACE=FOLDER first."
        )
    return [_parse(line) for file in files for line in file.read_text().splitlines()]


def _parse(line: str) -> LayerStep:
    raw = json.loads(line)
    sizes = raw["local_sizes"]
    return LayerStep(
        layer=raw["layer"],
        group=raw["group"],
        rank=raw["rank"],
        local_sizes=None if sizes is None else tuple(sizes),
        collectives=tuple((name, size) for name, size in raw["collectives"]),
        strategies=tuple(raw.get("strategies", ())),
    )


def most_uneven(steps: Iterable[LayerStep]) -> LayerStep | None:
    """The step with the most pad rows: the one that shows best what the layout does."""
    laid_out = [step for step in steps if step.layout() is not None]
    return max(laid_out, key=lambda step: TokenLayout.of(step.local_sizes or (), step.rank or 0).pad_rows, default=None)


@dataclass(frozen=True)
class LayerTotals:
    """One layer on one rank, over all steps."""

    layer: str
    rank: int | None
    steps: int
    strategies: dict[str, int]
    """Passes of each strategy."""
    gathers: int
    reduces: int
    exchanges: int
    """All-to-alls."""
    others: int
    bytes: int


def sum_by_layer(steps: Iterable[LayerStep]) -> list[LayerTotals]:
    """Collectives and bytes of each layer and rank, in the order of layer names."""
    by_key: dict[tuple[str, int | None], list[LayerStep]] = {}
    for step in steps:
        by_key.setdefault((step.layer, step.rank), []).append(step)
    return [_totals(layer, rank, group) for (layer, rank), group in sorted(by_key.items(), key=str)]


def _totals(layer: str, rank: int | None, steps: list[LayerStep]) -> LayerTotals:
    kinds: Counter[str] = Counter()
    for step in steps:
        kinds.update(kind for kind, _ in step.collectives)
    size = sum(size for step in steps for _, size in step.collectives)
    return LayerTotals(
        layer=layer,
        rank=rank,
        steps=len(steps),
        strategies=dict(Counter(name for step in steps for name in step.strategies)),
        gathers=kinds.pop("gather", 0),
        reduces=kinds.pop("reduce_scatter", 0),
        exchanges=kinds.pop("all_to_all", 0),
        others=sum(kinds.values()),
        bytes=size,
    )


def render(steps: list[LayerStep]) -> str:
    """The most uneven step as a picture, and a table of layers and ranks."""
    uneven = most_uneven(steps)
    lines = []
    if uneven is not None:
        lines = [f"most uneven step, layer {uneven.layer}, group {uneven.group}:", str(uneven.layout()), ""]
    columns = f"{'steps':>6} {'gathers':>8} {'reduces':>8} {'a2a':>6} {'others':>7} {'bytes':>12}  passes"
    lines.append(f"{'layer':40} {'rank':>4} {columns}")
    return "\n".join([*lines, *map(_row, sum_by_layer(steps))])


def _row(row: LayerTotals) -> str:
    passes = ", ".join(f"{count} {name}" for name, count in row.strategies.items())
    return (
        f"{row.layer:40} {row.rank!s:>4} {row.steps:6} {row.gathers:8} {row.reduces:8} {row.exchanges:6} "
        f"{row.others:7} {row.bytes:12}  {passes}"
    )
