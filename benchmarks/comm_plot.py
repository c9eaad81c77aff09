"""The picture of bench_comm.py: time of a layer against the group size or the tokens of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLES = {
    "native": ("tab:blue", "o"),
    "torch form": ("tab:cyan", "s"),
    "unpad/repack": ("tab:red", "v"),
    "uneven": ("tab:orange", "^"),
    "bare packed": ("tab:gray", "+"),
    "bare": ("black", "x"),
}


def draw(rows: Sequence[dict[str, Any]], path: Path, *, against: str) -> None:
    """One panel each for host and wall time (a device's) or for even and skewed token counts (a CPU's).

    Args:
        rows: of bench_comm.py; path: of the PNG.
        against: "ranks" or "tokens", the horizontal axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    device = any(row["kernels"] for row in rows)
    panels = [("even", "host"), ("even", "wall")] if device else [("even", "host"), ("skewed", "host")]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 4.2), sharey=True)
    for axis, (pattern, clock) in zip(axes, panels, strict=True):
        for method, (color, marker) in STYLES.items():
            mine = [row for row in rows if row["method"] == method and row["pattern"] == pattern]
            if mine:
                values = [row[clock]["median"] for row in mine]
                axis.plot([row[against] for row in mine], values, color=color, marker=marker, label=method)
        axis.set(xscale="log", yscale="log", title=f"{clock} time, {pattern} tokens")
        axis.set_xlabel({"ranks": "ranks R", "tokens": "tokens on the fullest rank"}[against])
        axis.set_xscale("log", base=2)
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0].set_ylabel("microseconds a layer")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
