"""Pictures (SVG) of what each strategy moves, computed from a small routing.

    python -m vllm_ascend_moe.tools.strategy_picture docs

Symbols: T_r tokens of rank r; R ranks; M max(T_r); K top-k; E experts; C capacity.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_moe.comm.cost_model import Strategy
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.tools.picture import svg_arrow, svg_cell, svg_document, svg_text

_CELL, _LINE, _RANK_GAP, _LEFT, _TOP, _ARROW = 26, 28, 12, 84, 84, 120


@dataclass(frozen=True)
class Example:
    """A routing small enough to draw: ``ids[r][i]`` are the experts of token i of rank r."""

    ids: tuple[tuple[tuple[int, ...], ...], ...]
    num_experts: int
    capacity: int

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement.linear(self.num_experts, len(self.ids))

    @property
    def max_local_size(self) -> int:
        return max(map(len, self.ids))

    def tokens(self) -> list[tuple[int, int]]:
        """(rank, index) of every token."""
        return [(rank, i) for rank, chosen in enumerate(self.ids) for i in range(len(chosen))]

    def goes_to(self, token: tuple[int, int], rank: int) -> bool:
        """Whether an expert of the token lives on ``rank``."""
        return any(self.placement.ranks[expert] == rank for expert in self.ids[token[0]][token[1]])


EXAMPLE = Example(ids=(((0, 3), (1, 2), (4, 5)), ((2, 3),), ((0, 1), (5, 2))), num_experts=6, capacity=3)


@dataclass(frozen=True)
class Cell:
    """A row of a tensor: a token of a rank, or (``token`` None) a pad row or an empty slot."""

    token: tuple[int, int] | None = None
    faded: bool = False  # travelled here, and no expert here works on it


def arrived(example: Example, strategy: Strategy, rank: int) -> list[tuple[str, list[Cell]]]:
    """What the experts of ``rank`` get: lines of cells, one for the rows formats, one an expert for the batched one."""
    if strategy == "all_to_all":
        return [("", [Cell(token) for token in example.tokens() if example.goes_to(token, rank)])]
    if strategy == "padded_allgather":
        cells = []
        for source, chosen in enumerate(example.ids):
            for i in range(example.max_local_size):
                token = (source, i)
                real = i < len(chosen)
                cells.append(Cell(token, not example.goes_to(token, rank)) if real else Cell())
        return [("", cells)]
    lines = []
    for expert in example.placement.experts_of(rank):
        here = [Cell(token) for token in example.tokens() if expert in example.ids[token[0]][token[1]]]
        empty = [Cell()] * (example.capacity * len(example.ids) - len(here))
        lines.append((f"expert {expert}", here + empty))
    return lines


def rows_sent(example: Example, strategy: Strategy) -> int:
    """Rows that cross from one rank to another on the way out, all ranks together."""
    ranks = len(example.ids)
    if strategy == "all_to_all":
        return sum(
            example.goes_to(token, rank) for token in example.tokens() for rank in range(ranks) if rank != token[0]
        )
    size = example.max_local_size if strategy == "padded_allgather" else example.capacity
    return ranks * (ranks - 1) * size


_TITLES: dict[Strategy, tuple[str, str, str]] = {
    "padded_allgather": ("every rank gets every row", "(R, M, H); faded: no expert here", "reduce-scatter of R*M rows"),
    "all_to_all": (
        "a row for each rank with an expert",
        "exact counts, ids and weights beside",
        "partial sums come back",
    ),
    "batched_all_to_all": (
        "[E_l, C*R, H], a line an expert",
        "filled up to expert_num_tokens",
        "C sums from each rank",
    ),
}
HEADS: dict[Strategy, str] = {
    "padded_allgather": "Padded all-gather",
    "all_to_all": "All-to-all by row",
    "batched_all_to_all": "Batched all-to-all, fixed capacity",
}


def strategy_svg(example: Example, strategy: Strategy) -> str:
    """One layer in three steps: tokens at home with their experts, what experts get, and what comes back."""
    lines = [arrived(example, strategy, rank) for rank in range(len(example.ids))]
    columns = max(len(cells) for of_rank in lines for _, cells in of_rank)
    home = max(example.max_local_size * _CELL, 180)
    middle = _LEFT + home + _ARROW
    right = middle + _LEFT + max(columns * _CELL, 210) + _ARROW
    head, note, back = _TITLES[strategy]
    parts = [svg_text(18, 26, f"{HEADS[strategy]}: {rows_sent(example, strategy)} rows cross", 16, weight="bold")]
    for x, title, small in (
        (0, "tokens at home", "below: their experts"),
        (middle, head, note),
        (right, "summed at home", back),
    ):
        parts += [svg_text(x + _LEFT, 54, title), svg_text(x + _LEFT, 70, small, 12)]
    y = float(_TOP)
    for rank, of_rank in enumerate(lines):
        parts.append(_home(example, rank, 0, y, experts=True))
        for n, (label, cells) in enumerate(of_rank):
            top = y + n * _LINE
            parts.append(svg_text(middle + _LEFT - 8, top + 17, label or f"rank {rank}", 12, "end"))
            parts += [_draw(cell, middle + _LEFT + i * _CELL, top) for i, cell in enumerate(cells)]
        parts.append(_home(example, rank, right, y, experts=False))
        y += max(len(of_rank), 1.5) * _LINE + _RANK_GAP
    centre = (_TOP + y) / 2
    parts.append(svg_arrow(_LEFT + home, middle + 24, centre, "dispatch"))
    parts.append(svg_arrow(right - _ARROW, right + 24, centre, "combine"))
    return svg_document(right + _LEFT + home, y + 8, "".join(parts))


def _home(example: Example, rank: int, x: float, y: float, *, experts: bool) -> str:
    parts = [svg_text(x + _LEFT - 8, y + 17, f"rank {rank}", 12, "end")]
    for i, chosen in enumerate(example.ids[rank]):
        left = x + _LEFT + i * _CELL
        parts.append(svg_cell(left, y, rank, f"{rank}.{i}"))
        if experts:
            parts.append(svg_text(left + _CELL / 2 - 1, y + 36, ",".join(map(str, chosen)), 10, "middle"))
    return "".join(parts)


def _draw(cell: Cell, x: float, y: float) -> str:
    if cell.token is None:
        return svg_cell(x, y, None, "")
    drawn = svg_cell(x, y, cell.token[0], f"{cell.token[0]}.{cell.token[1]}")
    return f'<g opacity="0.35">{drawn}</g>' if cell.faded else drawn


def main(folder: str) -> None:
    """Writes one picture a strategy."""
    for strategy in HEADS:
        (Path(folder) / f"{strategy}.svg").write_text(strategy_svg(EXAMPLE, strategy))


if __name__ == "__main__":
    main(sys.argv[1])
