"""A projection, not a measurement: time and bytes of the strategies on Atlas A2 and A3 by the cost model of
``comm/cost_model.py`` on published link figures (``comm/links.py`` names the sources and what is assumed).

    python benchmarks/bench_comm_projection.py

Nothing is run. The shape is DeepSeek-V3's (H 7168, E 256, top-8, bf16); all ranks have as many tokens, and C is that.
So uneven_allgather, which is for counts that differ, costs what padded_allgather does. A time in parentheses is of a
strategy that cannot be used there; the JSON says why.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from comm_plot import crossover, draw_projection
from measure import table, write_json

from vllm_ascend_moe.comm.cost_model import STRATEGIES, MoEShape
from vllm_ascend_moe.comm.links import LINKS
from vllm_ascend_moe.comm.select import price, select
from vllm_ascend_moe.comm.situation import Situation, obstacle_to

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
COLUMNS = ["link", "ranks", "tokens", "chosen", *STRATEGIES]


def project(link: str, ranks: int, tokens: int, quantized: bool) -> dict[str, Any]:
    """Microseconds and megabytes (out and back, all ranks but this one) of each strategy, and which cannot be used."""
    shape = MoEShape(hidden_size=7168, num_experts=256, top_k=8, payload="int8" if quantized else "none")
    situation = Situation(shape=shape, link=LINKS[link], capacity=tokens)
    sizes = (tokens,) * ranks
    costs = price(sizes, situation)
    obstacles = {name: obstacle_to(name, sizes, situation) for name in costs}
    return {
        "link": link,
        "ranks": ranks,
        "tokens": tokens,
        "quantized": quantized,
        "chosen": select(sizes, situation).strategy,
        **{name: round(cost.us) for name, cost in costs.items()},
        "not possible": {name: why for name, why in obstacles.items() if why is not None},
        "MB": {name: round((cost.dispatch_bytes + cost.combine_bytes) / 1e6, 3) for name, cost in costs.items()},
        "MB between nodes": {name: round(cost.node_bytes / 1e6, 3) for name, cost in costs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["atlas-a2", "atlas-a3"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--quantized", action="store_true", help="int8 or fp8 on the way out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows = [project(link, r, t, args.quantized) for link in args.links for r in args.ranks for t in TOKENS]
    name = "comm_projection" + ("_quantized" if args.quantized else "")
    sources = {link: LINKS[link].source for link in args.links}
    command = shlex.join(["python", "benchmarks/bench_comm_projection.py", *sys.argv[1:]])
    write_json(args.out / f"{name}.json", command, rows, projection=sources)
    print("PROJECTION by a cost model on published link figures; nothing was measured. Microseconds a layer.")
    for link, source in sources.items():
        print(f"{link}: {source}")
    print(table([{**row, **{name: f"({row[name]})" for name in row["not possible"]}} for row in rows], COLUMNS))
    for link in args.links:
        for ranks in args.ranks:
            here = [row for row in rows if (row["link"], row["ranks"]) == (link, ranks)]
            curves = [[(r["tokens"], r[name]) for r in here] for name in ("padded_allgather", "all_to_all")]
            found = crossover(*curves)
            print(f"{link}, R = {ranks}: all_to_all wins from {found:.0f} tokens a rank" if found is not None else
                  f"{link}, R = {ranks}: padded_allgather wins up to {TOKENS[-1]} tokens a rank")  # fmt: skip
    draw_projection(rows, args.out / f"{name}.png")
    print(f"written: {name}.json, {name}.png")


if __name__ == "__main__":
    main()
