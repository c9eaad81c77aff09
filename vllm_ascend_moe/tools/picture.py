"""The padded layout as a picture (SVG), drawn from a TokenLayout."""

from __future__ import annotations

from html import escape

from vllm_ascend_moe.layout import TokenLayout

_CELL, _GAP, _LEFT, _TOP = 26, 18, 96, 64
_COLOURS = ("#2f6db3", "#c8642b", "#3b8f5a", "#8a4fa3", "#b3922f", "#3f8f96", "#a33f5e", "#5d6b7a")
_PAD = "#e9ecef"


def _text(x: float, y: float, text: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#222">{escape(text)}</text>'
    )


def _cell(x: float, y: float, fill: str, label: str) -> str:
    colour = "#fff" if fill != _PAD else "#868e96"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{_CELL - 2}" height="{_CELL - 2}" rx="3" fill="{fill}" stroke="#ced4da"/>'
        f'<text x="{x + _CELL / 2 - 1:g}" y="{y + 17:g}" font-size="11" text-anchor="middle" fill="{colour}">'
        f"{escape(label)}</text>"
    )


def _rank_row(layout: TokenLayout, rank: int, y: float) -> str:
    """The cells of one rank: its tokens, then its pad."""
    size, colour = layout.local_sizes[rank], _COLOURS[rank % len(_COLOURS)]
    parts = [_text(_LEFT - 10, y + 17, f"rank {rank}", anchor="end")]
    for column in range(layout.max_local_size):
        real = column < size
        parts.append(_cell(_LEFT + column * _CELL, y, colour if real else _PAD, f"{rank}.{column}" if real else "pad"))
    return "".join(parts)


def layout_svg(layout: TokenLayout) -> str:
    """The steps of one MoE layer: what each rank holds, what is gathered, what the reduce-scatter returns.

    Args:
        layout: any layout; one with at most about 8 ranks and 12 tokens a rank reads well.

    Returns:
        An SVG document.
    """
    ranks, size = layout.ep_size, layout.max_local_size
    panel = size * _CELL + _LEFT
    height = _TOP + ranks * (_CELL + 4) + 88
    width = 2 * panel + 3 * _GAP + 120
    parts = [
        _text(_GAP, 26, f"Padded layout: {layout.num_tokens} tokens, {ranks} ranks, M = {size}", 16, weight="bold"),
        _text(_LEFT, 50, "each rank pads its tokens to M rows"),
        _text(panel + 120 + _LEFT, 50, f"after the all-gather: ({ranks}, {size}, H), on every rank"),
    ]
    for rank in range(ranks):
        y = _TOP + rank * (_CELL + 4)
        parts.append(_rank_row(layout, rank, y))
        parts.append(f'<g transform="translate({panel + 120} 0)">{_rank_row(layout, rank, y)}</g>')
    middle = _TOP + ranks * (_CELL + 4) / 2
    parts.append(_arrow(_LEFT + size * _CELL + 10, panel + 120 + _LEFT - 60, middle, "all-gather"))
    foot = _TOP + ranks * (_CELL + 4) + 26
    parts.append(
        _text(_LEFT, foot, "Experts work on the gathered tensor as it is: pad rows have expert id -1 and cost nothing.")
    )
    parts.append(
        _text(
            _LEFT,
            foot + 20,
            "One reduce-scatter takes the same (R, M, H) tensor back; each rank drops its own pad tail.",
        )
    )
    parts.append(_text(_LEFT, foot + 40, "No unpad, no repack, no copy in between."))
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def _arrow(x1: float, x2: float, y: float, label: str) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y:g}" x2="{x2 - 8:g}" y2="{y:g}" stroke="#495057" stroke-width="2"/>'
        f'<path d="M {x2 - 10:g} {y - 6:g} L {x2:g} {y:g} L {x2 - 10:g} {y + 6:g} z" fill="#495057"/>'
        + _text((x1 + x2) / 2, y - 10, label, 12, "middle")
    )
