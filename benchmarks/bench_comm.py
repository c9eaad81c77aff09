"""Host and wall time of one MoE layer's communication: ours, the unpad/repack baseline, and the bare collectives.

    python benchmarks/bench_comm.py --backend fake                  # host time against R, one process
    python benchmarks/bench_comm.py --backend gloo --ranks 2
    python benchmarks/bench_comm.py --backend nccl --ranks 2        # one GPU a rank, or one for all: see launch.py
    python benchmarks/bench_comm.py --backend nccl --ranks 2 --suite strategies     # all-to-all beside all-gather
    python benchmarks/bench_comm.py --backend hccl --ranks 2        # one NPU a rank; needs torch_npu

Host time is what the calling thread spends until the last operation is queued; wall time is until the device is done,
in a loop of layers. Figures are medians over repetitions in which the methods take turns; ``host_min`` is the smallest
of them, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_methods import Bare, BarePacked, Padded, Traffic, Uneven, UnpadRepack
from comm_plot import draw, draw_strategies
from comm_profile import profile_layer
from measure import environment, spread, table, write_json
from strategy_methods import STRATEGY_METHODS, bare_of

from vllm_ascend_moe.testing.launch import launch

LAYOUT_METHODS: dict[str, Callable[[Traffic], Any]] = {
    "native": Padded,  # as configured by default: packed up to a size, coalesced above
    "native packed": partial(Padded, packed_bytes=1 << 60),
    "native coalesced": partial(Padded, packed_bytes=0),
    "torch form": partial(Padded, native=False, packed_bytes=0),
    "unpad/repack": UnpadRepack,
    "uneven": Uneven,
    "bare packed": BarePacked,
    "bare": Bare,
}
SUITES = {"layout": LAYOUT_METHODS, "strategies": STRATEGY_METHODS}
COLUMNS = ["ranks", "tokens", "pattern", "method", "host_min", "host_us", "wall_us", "host/bare", "wall/bare", "ops",
           "kernels", "allocs", "MB"]  # fmt: skip
STRATEGY_COLUMNS = ["ranks", "tokens", "pattern", "method", "host_us", "wall_us", "wall/bare", "wall_min", "min/bare",
                    "ops", "kernels", "allocs", "comm_MB"]  # fmt: skip


def sizes_of(tokens: int, ranks: int, pattern: str) -> list[int]:
    """Token counts a rank: all alike, or falling from ``tokens`` on rank 0 to a quarter of it on the last."""
    if pattern == "even" or ranks == 1:
        return [tokens] * ranks
    return [max(1, tokens - tokens * 3 * r // (4 * (ranks - 1))) for r in range(ranks)]


def make_methods(args: argparse.Namespace, traffic: Traffic) -> dict[str, Any]:
    # gloo and the fake group raise for lists of unequal parts; HCCL has never been tried.
    skipped = set() if args.backend == "nccl" else {"uneven"}
    methods = SUITES[args.suite]
    return {name: methods[name](traffic) for name in args.methods or methods if name not in skipped}


def check_equal(methods: dict[str, Any], traffic: Traffic) -> None:
    """Every method returns what it should: its ``expected()``, or each rank's hidden, gathered R times and summed."""
    size = traffic.layout.local_size
    gathered = traffic.hidden * traffic.layout.ep_size
    for name, method in methods.items():
        if name in ("bare rows", "bare batched"):  # move rows of zeros
            continue
        want = method.expected() if hasattr(method, "expected") else gathered
        got = method.layer()[:size]
        if not torch.equal(got, want):
            raise AssertionError(f"{name} returns other rows than the layer should")


def time_layers(method: Any, layers: int, device: torch.device) -> tuple[float, float]:
    """(host, wall) seconds a layer; one layer before, untimed, brings this method's code back into the caches."""
    method.layer()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(layers):
        method.layer()
    queued = time.perf_counter()
    synchronize(device)
    return (queued - start) / layers, (time.perf_counter() - start) / layers


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def run_case(
    rank: int, args: argparse.Namespace, ranks: int, tokens: int, pattern: str, device: torch.device
) -> list[dict[str, Any]]:
    traffic = Traffic.make(sizes_of(tokens, ranks, pattern), rank, args.hidden, args.top_k, device)
    methods = make_methods(args, traffic)
    if args.backend != "fake":
        check_equal(methods, traffic)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    order = list(methods.items())
    for repeat in range(args.repeats + 2):
        order.append(order.pop(0))  # nobody always runs after the same other one
        for name, method in order:
            measured = time_layers(method, args.layers, device)
            if repeat >= 2:
                times[name].append(measured)
    rows = []
    for name, method in methods.items():
        host, wall = (spread([t[i] for t in times[name]], 1e6) for i in (0, 1))
        rows.append(
            {"ranks": ranks, "tokens": tokens, "pattern": pattern, "method": name, "host": host, "wall": wall}
            | profile_layer(method, device)
        )
        if hasattr(method, "comm_bytes"):
            rows[-1]["comm_MB"] = round(method.comm_bytes / 1e6, 3)
    add_ratios(rows, args.suite)
    return rows


def add_ratios(rows: list[dict[str, Any]], suite: str) -> None:
    by_name = {row["method"]: row for row in rows}
    for row in rows:
        row["host_us"], row["wall_us"] = round(row["host"]["median"], 1), round(row["wall"]["median"], 1)
        row["host_min"], row["wall_min"] = round(row["host"]["min"], 1), round(row["wall"]["min"], 1)
        bare = by_name.get("bare" if suite == "layout" else bare_of(row["method"]))
        if bare is not None:
            row["host/bare"] = round(row["host"]["median"] / bare["host"]["median"], 2)
            row["wall/bare"] = round(row["wall"]["median"] / bare["wall"]["median"], 2)
            row["min/bare"] = round(row["wall"]["min"] / bare["wall"]["min"], 2)


def rank_main(rank: int, ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    elif args.backend == "hccl":
        device = torch.device("npu", rank)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for pattern in args.patterns:
            for tokens in args.tokens:
                rows += run_case(rank, args, ranks, tokens, pattern, device)
    return rows


def run_fake(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One process plays rank 0 of groups of any size; collectives move nothing between ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    rows = []
    for ranks in args.ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        rows += rank_main(0, ranks, args)
        dist.destroy_process_group()
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["fake", "gloo", "nccl", "hccl"], default="fake")
    parser.add_argument("--ranks", type=int, nargs="+", help="group sizes [2 .. 256 for fake, else 2]")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens on the fullest rank")
    parser.add_argument("--patterns", nargs="+", choices=["even", "skewed"], default=["even", "skewed"])
    parser.add_argument("--suite", choices=list(SUITES), default="layout", help="which methods are compared [layout]")
    parser.add_argument("--methods", nargs="+", help="some methods of the suite [all]")
    parser.add_argument("--hidden", type=int, help="H [64 for fake, else 7168]")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=20, help="layers between two synchronisations")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--timeout-s", type=float, default=600, help="of one collective; of a group size twice that")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    unknown = set(args.methods or ()) - set(SUITES[args.suite])
    if unknown:
        parser.error(f"--methods {sorted(unknown)}: the suite {args.suite} has {', '.join(SUITES[args.suite])}")
    if args.suite == "strategies" and args.backend == "fake":
        parser.error("--suite strategies needs a backend that moves bytes: row counts travel in it")
    fake = args.backend == "fake"
    args.ranks = args.ranks or ([2, 4, 8, 16, 32, 64, 128, 256] if fake else [2])
    args.tokens = args.tokens or ([4] if fake else [1, 8, 32, 128, 512, 2048, 8192])
    args.hidden = args.hidden or (64 if fake else 7168)
    return args


def main() -> None:
    args = parse_args()
    if args.backend == "fake":
        rows = run_fake(args)
    else:
        rows = [
            row
            for n in args.ranks
            for row in launch(n, rank_main, args, backend=args.backend, timeout_s=args.timeout_s)[0]
        ]
    name = f"comm_{args.backend}" if args.suite == "layout" else f"strategies_{args.backend}"
    if args.backend == "nccl" and max(args.ranks) > torch.cuda.device_count():
        name += "_shared_gpu"  # host times are real ones; wall times are those of sockets and of taking turns
    path, plot = args.out / f"{name}.json", args.out / f"{name}.png"
    write_json(path, shlex.join(["python", "benchmarks/bench_comm.py", *sys.argv[1:]]), rows)
    print({**environment(), "backend": args.backend, "hidden": args.hidden, "top_k": args.top_k})
    print(table(rows, COLUMNS if args.suite == "layout" else STRATEGY_COLUMNS))
    if args.suite == "layout":
        draw(rows, plot, against="ranks" if len(args.ranks) > 1 else "tokens")
    else:
        draw_strategies(rows, plot)
    print(f"written: {path.name}, {plot.name}")


if __name__ == "__main__":
    main()
