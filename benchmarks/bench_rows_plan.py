"""Host time, launches and device time of the all-to-all by row beside its collectives: Triton's form and plain torch.

    python benchmarks/bench_rows_plan.py --device cuda

One process plays rank 0 of R ranks. Collectives move nothing: every rank is said to send what rank 0 sends it, so that
the exchange of counts is one copy of R numbers, and rows "arrive" where they are. What is left is the work of this
package. host_us is the time of the calling thread in dispatch and combine without its wait for the counts; wall_us
until the device is done. Needs only torch and triton.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vllm_ascend_moe.comm import host_read, row_plan
from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement

NUM_EXPERTS = 256
_PROFILED = 20


class Mirror:
    """Rank 0 of R ranks that all send what it sends them."""

    def __init__(self, ranks: int) -> None:
        self.world_size, self.rank_in_group = ranks, 0

    def all_to_all(
        self, x: torch.Tensor, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None
    ) -> torch.Tensor:
        return x


class TimedRead(host_read.HostRead):
    """Adds up the time that the host waits."""

    waited = 0.0

    def wait(self) -> list[Any]:
        start = time.perf_counter()
        if self._event is not None:
            self._event.synchronize()
        TimedRead.waited += time.perf_counter() - start
        return super().wait()


class Layer:
    """Dispatch and combine of T tokens, expert outputs made beforehand."""

    def __init__(self, tokens: int, ranks: int, hidden_size: int, topk: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(tokens)
        self.comm = AllToAll(Mirror(ranks), ExpertPlacement.linear(NUM_EXPERTS, ranks))  # type: ignore[arg-type]
        ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(topk, dim=1).indices.int()
        self.given = {
            "hidden": torch.randn(tokens, hidden_size, generator=generator).bfloat16().to(device),
            "topk_weights": torch.rand(tokens, topk, generator=generator).to(device),
            "topk_ids": ids.to(device),
            "num_experts": NUM_EXPERTS,
            "layout": TokenLayout.of([tokens] * ranks, 0),
        }
        self.rows = sum(len({e * ranks // NUM_EXPERTS for e in row}) for row in ids.tolist())
        self.expert_output = torch.randn(self.rows, hidden_size, generator=generator).bfloat16().to(device)
        self.row_bytes = hidden_size * 2 + topk * 8

    def __call__(self) -> torch.Tensor:
        return self.comm.combine(self.expert_output, self.comm.dispatch(**self.given).handle)


def timed(layer: Layer, repeats: int) -> dict[str, float]:
    """Medians of single layers, each started on an idle device; ``loop_us``: of a layer in a run of them."""
    host, wall = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        TimedRead.waited = 0.0
        start = time.perf_counter()
        layer()
        host.append(time.perf_counter() - start - TimedRead.waited)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(repeats):
        layer()
    torch.cuda.synchronize()
    loop = (time.perf_counter() - start) / repeats
    return {
        "host_us": round(statistics.median(host) * 1e6, 1),
        "host_min_us": round(min(host) * 1e6, 1),
        "wall_us": round(statistics.median(wall) * 1e6, 1),
        "loop_us": round(loop * 1e6, 1),
    }


def profiled(layer: Layer) -> dict[str, Any]:
    """Launches and copies of a layer, and microseconds of each on the device."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(_PROFILED):
            layer()
        torch.cuda.synchronize()
    events = [e for e in trace.key_averages() if e.device_type == DeviceType.CUDA and "::" not in e.key]
    kernels = {e.key[:60]: round(e.self_device_time_total / _PROFILED, 2) for e in events}
    return {
        "launches": round(sum(e.count for e in events) / _PROFILED, 1),
        "device_us": round(sum(kernels.values()), 1),
        "kernels": kernels,
    }


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy, read and written ones together."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    y, times = torch.empty_like(x), []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * x.numel() / min(times)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128, 512, 2048, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def measure(args: argparse.Namespace, ranks: int, tokens: int, speed: float) -> list[dict[str, Any]]:
    device = torch.device(args.device)
    layer, rows, results = Layer(tokens, ranks, args.hidden, args.top_k, device), [], {}
    usual = row_plan.form_on
    for form in ("torch", "triton"):
        row_plan.form_on = lambda device_type, form=form: form  # type: ignore[assignment,misc]
        row_plan.owner_table.cache_clear()
        for _ in range(5):
            results[form] = layer()
        row = {"ranks": ranks, "tokens": tokens, "rows": layer.rows, "form": form}
        rows.append(row | timed(layer, args.repeats) | profiled(layer))
    row_plan.form_on = usual
    if not torch.equal(results["torch"], results["triton"]):
        raise AssertionError("the two forms return different sums")
    row_size = args.hidden * 2
    for row in rows:
        row["pack_limit_us"] = round((tokens + layer.rows) * layer.row_bytes / speed * 1e6, 2)
        row["sum_limit_us"] = round((tokens + layer.rows) * row_size / speed * 1e6, 2)
        row["pack_us"] = sum(us for name, us in row["kernels"].items() if name.startswith("pack_rows"))
        row["sum_us"] = sum(us for name, us in row["kernels"].items() if name.startswith("combine"))
    return rows


COLUMNS = ["ranks", "tokens", "rows", "form", "host_us", "host_min_us", "wall_us", "loop_us", "launches", "device_us",
           "pack_us", "pack_limit_us", "sum_us", "sum_limit_us"]  # fmt: skip


def main() -> None:
    args = parse_args()
    from vllm_ascend_moe.comm import all_to_all

    all_to_all.HostRead = TimedRead  # type: ignore[misc]
    speed = bandwidth(torch.device(args.device))
    rows = []
    print(f"copy: {speed / 1e9:.0f} GB/s\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with torch.inference_mode():
        for ranks in args.ranks:
            for tokens in args.tokens:
                for row in measure(args, ranks, tokens, speed):
                    rows.append(row)
                    print("| " + " | ".join(str(row[name]) for name in COLUMNS) + " |", flush=True)
    environment = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "copy_GB_s": round(speed / 1e9),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/bench_rows_plan.py", *sys.argv[1:]])
    record = {"command": command, "environment": environment, "rows": rows}
    (args.out / "rows_plan.json").write_text(json.dumps(record, indent=1))
    print({row["form"]: row["kernels"] for row in rows if row["tokens"] == args.tokens[-1]})


if __name__ == "__main__":
    main()
