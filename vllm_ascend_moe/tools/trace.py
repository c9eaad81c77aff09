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
    gathers: int
    reduces: int
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
    gathers, reduces = kinds.pop("gather", 0), kinds.pop("reduce_scatter", 0)
    return LayerTotals(layer, rank, len(steps), gathers, reduces, sum(kinds.values()), size)
