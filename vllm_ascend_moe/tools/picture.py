"""The padded layout as a picture (SVG), drawn from a TokenLayout."""

from __future__ import annotations

from html import escape

from vllm_ascend_moe.layout import TokenLayout

_CELL, _ROW, _GAP, _LEFT, _TOP = 26, 30, 18, 80, 82
_TITLE_WIDTH, _ARROW = 190, 110
_COLOURS = ("#2f6db3", "#c8642b", "#3b8f5a", "#8a4fa3", "#b3922f", "#3f8f96", "#a33f5e", "#5d6b7a")
_PAD = "#e9ecef"


def svg_text(x: float, y: float, text: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    """A line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#222">{escape(text)}</text>'
    )


def svg_cell(x: float, y: float, rank: int | None, label: str) -> str:
    """A row of a tensor in its rank's colour; ``rank`` None: a pad row."""
    fill, colour = (_PAD, "#868e96") if rank is None else (_COLOURS[rank % len(_COLOURS)], "#fff")
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{_CELL - 2}" height="{_CELL - 2}" rx="3" fill="{fill}" stroke="#ced4da"/>'
        f'<text x="{x + _CELL / 2 - 1:g}" y="{y + 17:g}" font-size="11" text-anchor="middle" fill="{colour}">'
        f"{escape(label)}</text>"
    )


def _rank_row(layout: TokenLayout, rank: int, y: float, *, show_pad: bool) -> str:
    """The cells of one rank: its tokens, then its pad (or nothing, where the pad was dropped)."""
    size = layout.local_sizes[rank]
    parts = [svg_text(_LEFT - 10, y + 17, f"rank {rank}", anchor="end")]
    for column in range(layout.max_local_size if show_pad else size):
        real = column < size
        label = f"{rank}.{column}" if real else "pad"
        parts.append(svg_cell(_LEFT + column * _CELL, y, rank if real else None, label))
    return "".join(parts)


def _panel(layout: TokenLayout, x: float, title: tuple[str, str], *, show_pad: bool) -> str:
    rows = "".join(_rank_row(layout, rank, _TOP + rank * _ROW, show_pad=show_pad) for rank in range(layout.ep_size))
    head = svg_text(_LEFT, 52, title[0]) + svg_text(_LEFT, 68, title[1], 12)
    return f'<g transform="translate({x:g} 0)">{head}{rows}</g>'


_FOOT = (
    "Experts work on the gathered tensor as it is: pad rows have expert id -1 and cost nothing.",
    "One reduce-scatter takes the same (R, M, H) tensor back, and each rank drops its own pad tail.",
    "Nothing is unpadded, repacked or copied in between.",
)


def layout_svg(layout: TokenLayout) -> str:
    """One MoE layer in three steps: what each rank holds, what is gathered, what comes back.

    Args:
        layout: any layout; one with at most about 8 ranks and 12 tokens a rank reads well.

    Returns:
        An SVG document.
    """
    ranks, size = layout.ep_size, layout.max_local_size
    step = _LEFT + max(size * _CELL, _TITLE_WIDTH) + _ARROW
    width, foot = 3 * step - _ARROW + _GAP, _TOP + ranks * _ROW + 28
    titles = (
        ("each rank pads its tokens", f"T_r rows to M = {size} rows"),
        ("gathered, on every rank", f"({ranks}, {size}, H), until the reduce"),
        ("reduced and scattered", "T_r rows on rank r"),
    )
    parts = [svg_text(_GAP, 26, f"{layout.num_tokens} tokens on {ranks} ranks in the padded layout", 16, weight="bold")]
    parts += [_panel(layout, i * step, title, show_pad=i < 2) for i, title in enumerate(titles)]
    middle = _TOP + ranks * _ROW / 2
    for i, label in enumerate(("all-gather", "experts, reduce-scatter")):
        start = i * step + _LEFT + max(size * _CELL, _TITLE_WIDTH)
        parts.append(svg_arrow(start, start + _ARROW + 24, middle, label))
    parts += [svg_text(_GAP, foot + 20 * i, line) for i, line in enumerate(_FOOT)]
    return svg_document(width, foot + 56, "".join(parts))


def svg_document(width: float, height: float, body: str) -> str:
    """``body`` on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def svg_arrow(x1: float, x2: float, y: float, label: str) -> str:
    """From left to right, with a label above."""
    return (
        f'<line x1="{x1:g}" y1="{y:g}" x2="{x2 - 8:g}" y2="{y:g}" stroke="#495057" stroke-width="2"/>'
        f'<path d="M {x2 - 10:g} {y - 6:g} L {x2:g} {y:g} L {x2 - 10:g} {y + 6:g} z" fill="#495057"/>'
        + svg_text((x1 + x2) / 2, y - 10, label, 11, "middle")
    )
