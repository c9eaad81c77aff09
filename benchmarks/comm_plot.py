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


STRATEGY_STYLES = {
    "padded": ("tab:blue", "o"),
    "rows": ("tab:green", "s"),
    "batched": ("tab:orange", "^"),
    "mc2": ("tab:red", "v"),
}


def draw_strategies(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a group size: smallest wall time of a layer against tokens a rank, bare collectives dashed, and the
    crossover from padded all-gather to all-to-all by row as a vertical line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({row["ranks"] for row in rows})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(5.5 * len(sizes), 4.2), squeeze=False)
    for axis, ranks in zip(axes[0], sizes, strict=True):
        here = [row for row in rows if row["ranks"] == ranks and row["pattern"] == "even"]
        curves = {}
        for method in dict.fromkeys(row["method"] for row in here):
            base = method.removeprefix("bare ").split()[0]
            if base not in STRATEGY_STYLES or "int8" in method:
                continue
            color, marker = STRATEGY_STYLES[base]
            mine = sorted((row["tokens"], row["wall"]["min"]) for row in here if row["method"] == method)
            curves[method] = mine
            bare = method.startswith("bare")
            axis.plot(*zip(*mine, strict=True), color=color, marker="" if bare else marker,
                      linestyle="--" if bare else "-", label=method)  # fmt: skip
        found = crossover(curves.get("padded", []), curves.get("rows", []))
        if found is not None:
            axis.axvline(found, color="gray", linewidth=1)
            place = axis.get_xaxis_transform()
            axis.text(found, 0.03, f" rows win from {found:.0f}", color="gray", transform=place)
        axis.set(xscale="log", yscale="log", title=f"R = {ranks}", xlabel="tokens a rank")
        axis.set_xscale("log", base=2)
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0][0].set_ylabel("wall microseconds a layer")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def crossover(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float | None:
    """The tokens from which ``second`` stays below ``first``, between two points along a straight line of logarithms;
    None where it does not, the first point where it always is."""
    from math import exp, log

    at = dict(second)
    gaps = [(tokens, log(us / at[tokens])) for tokens, us in first if tokens in at]
    last = next((i for i in reversed(range(len(gaps))) if gaps[i][1] <= 0), None)
    if last is None:
        return gaps[0][0] if gaps else None
    if last == len(gaps) - 1:
        return None
    (x0, y0), (x1, y1) = gaps[last], gaps[last + 1]
    return exp(log(x0) + (log(x1) - log(x0)) * -y0 / (y1 - y0))


def draw_projection(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a link and group size: microseconds against tokens a rank by the cost model, marked as a projection.

    Of each strategy where it can be used. Without uneven_allgather, which lies on padded_allgather for even counts.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"padded_allgather": "padded", "all_to_all": "rows", "batched_all_to_all": "batched", "mc2": "mc2"}
    links, sizes = list(dict.fromkeys(row["link"] for row in rows)), sorted({row["ranks"] for row in rows})
    figure, axes = pyplot.subplots(
        len(links), len(sizes), figsize=(4.6 * len(sizes), 3.8 * len(links)), squeeze=False, sharey=True
    )
    for link, line in zip(links, axes, strict=True):
        for ranks, axis in zip(sizes, line, strict=True):
            here = [row for row in rows if (row["link"], row["ranks"]) == (link, ranks)]
            for strategy, name in names.items():
                color, marker = STRATEGY_STYLES[name]
                mine = [row for row in here if strategy in row and strategy not in row["not possible"]]
                axis.plot([row["tokens"] for row in mine], [row[strategy] for row in mine],
                          color=color, marker=marker, label=strategy)  # fmt: skip
            axis.set(xscale="log", yscale="log", title=f"{link}, R = {ranks}", xlabel="tokens a rank")
            axis.set_xscale("log", base=2)
            axis.grid(visible=True, which="both", alpha=0.25)
        line[0].set_ylabel("microseconds a layer")
    axes[0][0].legend()
    figure.suptitle("Projection by the cost model on published link figures; not a measurement")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
