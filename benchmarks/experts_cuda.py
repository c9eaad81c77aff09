"""Speed of the Triton expert kernels on one CUDA GPU, against torch and vLLM's own batched Triton kernel.

    python benchmarks/bench_experts.py --device cuda --json out.json [--vllm-file .../fused_batched_moe.py]

Contenders of a case run in turn, round after round, each as a replayed CUDA graph over several sets of weights (more
than the L2 cache holds), and the median round counts: on a chip whose clock follows its load, one contender after the
other would measure the order. Every result is compared with torch before it is timed. Needs torch and triton only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_kernel import best_vllm_tile, load_vllm_kernel, vllm_call

from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.quantize import activate_rows

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
# model -> (hidden size H, expert intermediate size N, experts E)
MODELS = {"qwen3-30b-a3b": (2048, 768, 128), "deepseek-v3": (7168, 2048, 256)}
EP_SIZES = (8, 32)
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
WEIGHT_BYTES = 4e8  # of all sets together: several times the L2 cache


@dataclass(frozen=True)
class Case:
    """One measurement: GEMM ``name`` with E_l experts, [rows, K] x [N, K]^T each."""

    model: str
    ep: int
    gemm: str  # w13, w2 or mlp
    skew: str  # uniform or skewed
    rows: int  # mean rows per expert


@dataclass
class Result:
    case: Case
    microseconds: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    weight_tb_per_s: dict[str, float] = field(default_factory=dict)
    note: str = ""


# -- timing -----------------------------------------------------------------------------------------------------


def capture(calls: list[Callable[[], object]], least_us: float = 300.0) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls, repeated until one replay takes about ``least_us``; and how many calls it holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        one = (time.perf_counter() - began) * 1e6
        repeats = max(1, min(8, int(least_us / one)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, repeats * len(calls)


def compare(contenders: dict[str, list[Callable[[], object]]], rounds: int = 11) -> dict[str, float]:
    """Median microseconds of one call of each contender; rounds take the contenders in turn."""
    graphs = {name: capture(calls) for name, calls in contenders.items()}
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + 2):
        for name, (graph, calls) in graphs.items():
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if round_ >= 2:
                times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def ceilings() -> dict[str, float]:
    """Dense bf16 TFLOP/s of an 8192^3 product and copy GB/s (bytes read plus written), on random data."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    times = compare({"dense": [lambda: a @ b], "copy": [lambda: torch.mul(source, 1.0, out=target)]}, rounds=9)
    return {
        "dense_tflops": 2 * 8192**3 / times["dense"] / 1e6,
        "copy_gb_per_s": 2 * source.numel() * 4 / times["copy"] / 1e3,
    }


# -- contenders -------------------------------------------------------------------------------------------------


def counts_of(experts: int, rows: int, skew: str, capacity: int) -> list[int]:
    """Rows of each expert: all the same, or in proportion 1, 1/2, 1/3, ... with the last expert empty."""
    if skew == "uniform":
        return [rows] * experts
    shares = [1.0 / (rank + 1) for rank in range(experts - 1)] + [0.0]
    total = rows * experts
    return [min(capacity, round(total * share / sum(shares))) for share in shares]


@dataclass
class Gemm:
    """Operands of one GEMM: rows at the full capacity, and the same real rows packed for torch."""

    a: torch.Tensor  # [E_l, capacity, K]
    weights: list[torch.Tensor]  # sets of [E_l, N, K]
    out: torch.Tensor  # [E_l, capacity, N]
    counts: list[int]

    @property
    def device_counts(self) -> torch.Tensor:
        return torch.tensor(self.counts, dtype=torch.int32, device=DEVICE)

    def packed(self) -> torch.Tensor:
        return torch.cat([self.a[e, :count] for e, count in enumerate(self.counts)])

    def mask(self) -> torch.Tensor:
        return torch.arange(self.a.shape[1], device=DEVICE) < self.device_counts[:, None]


def gemm_contenders(gemm: Gemm, rows: int, uniform: bool) -> dict[str, list[Callable[[], object]]]:
    """Ours and torch's, checked against each other."""
    counts, packed = gemm.device_counts, gemm.packed()
    offsets = counts.cumsum(0, dtype=torch.int32)
    result: dict[str, list[Callable[[], object]]] = {
        "ours": [lambda w=w: expert_gemm(gemm.a, w, counts, out=gemm.out, expected_rows=rows) for w in gemm.weights],
        "grouped": [lambda w=w: torch._grouped_mm(packed, w.mT, offs=offsets) for w in gemm.weights],
    }
    if uniform:
        dense = gemm.a[:, :rows].contiguous()
        into = torch.empty(dense.shape[0], rows, gemm.out.shape[2], device=DEVICE, dtype=DTYPE)
        result["bmm"] = [lambda w=w: torch.bmm(dense, w.mT, out=into) for w in gemm.weights]
    gemm.out.fill_(float("nan"))
    result["ours"][0]()
    check(gemm.out[gemm.mask()], result["grouped"][0](), "ours")
    if not bool(gemm.out[~gemm.mask()].isnan().all()):
        raise SystemExit("ours wrote past the counts")
    return result


def check(ours: torch.Tensor, theirs: Any, name: str) -> None:
    error = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    if not error < 6e-3:
        raise SystemExit(f"{name} differs from torch by {error:.1e}")


def mlp_contenders(
    a: torch.Tensor, sets: list[tuple[torch.Tensor, torch.Tensor]], counts: list[int], rows: int, uniform: bool
) -> dict[str, list[Callable[[], object]]]:
    """The whole expert MLP: two launches of ours; bmm, silu_and_mul (a fused kernel) and bmm; grouped likewise."""
    on_device = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    experts, capacity, _ = a.shape
    middle = torch.empty(experts, capacity, sets[0][1].shape[2], device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(a)

    def ours(w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        expert_gemm(a, w13, on_device, activation="silu", out=middle, expected_rows=rows)
        return expert_gemm(middle, w2, on_device, out=out, expected_rows=rows)

    packed = torch.cat([a[e, :count] for e, count in enumerate(counts)])
    offsets = on_device.cumsum(0, dtype=torch.int32)
    all_rows = torch.tensor([packed.shape[0]], dtype=torch.int32, device=DEVICE)

    def grouped(w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        h, _ = activate_rows(torch._grouped_mm(packed, w13.mT, offs=offsets)[None], all_rows)
        return torch._grouped_mm(h[0], w2.mT, offs=offsets)

    result: dict[str, list[Callable[[], object]]] = {
        "ours": [lambda s=s: ours(*s) for s in sets],
        "grouped": [lambda s=s: grouped(*s) for s in sets],
    }
    if uniform:
        dense = a[:, :rows].contiguous()
        full = torch.full((experts,), rows, dtype=torch.int32, device=DEVICE)

        def batched(w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
            return torch.bmm(activate_rows(torch.bmm(dense, w13.mT), full)[0], w2.mT)

        result["bmm"] = [lambda s=s: batched(*s) for s in sets]
    mask = torch.arange(capacity, device=DEVICE) < on_device[:, None]
    check(ours(*sets[0])[mask], grouped(*sets[0]), "ours")
    return result


# -- cases ------------------------------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for model in args.models:
        for ep in args.ep:
            for gemm in args.gemms:
                for skew in args.skews:
                    for rows in args.rows:
                        yield Case(model, ep, gemm, skew, rows)


def weight_sets(shape: tuple[int, ...]) -> list[torch.Tensor]:
    size = torch.Size(shape).numel() * 2
    return [
        torch.randn(shape, device=DEVICE, dtype=DTYPE) * shape[-1] ** -0.5
        for _ in range(max(2, int(WEIGHT_BYTES / size)))
    ]


def measure(case: Case, args: argparse.Namespace, tensors: dict[str, Any], invoke: Any) -> Result:
    hidden, inner, experts = MODELS[case.model]
    experts //= case.ep
    counts = counts_of(experts, case.rows, case.skew, args.capacity)
    uniform = case.skew == "uniform"
    key = f"{case.model} {case.ep} {case.gemm}"
    if tensors.get("key") != key:
        tensors.clear()
        torch.cuda.empty_cache()
        w13, w2 = (experts, 2 * inner, hidden), (experts, hidden, inner)
        tensors["key"] = key
        k, n = {"w13": (hidden, 2 * inner), "w2": (inner, hidden), "mlp": (hidden, hidden)}[case.gemm]
        tensors["a"] = torch.randn(experts, args.capacity, k, device=DEVICE, dtype=DTYPE)
        if case.gemm == "mlp":
            tensors["weights"] = list(zip(weight_sets(w13), weight_sets(w2), strict=False))
        else:
            tensors["weights"] = weight_sets(w13 if case.gemm == "w13" else w2)
            tensors["out"] = torch.empty(experts, args.capacity, n, device=DEVICE, dtype=DTYPE)
    result = Result(case)
    if case.gemm == "mlp":
        contenders = mlp_contenders(tensors["a"], tensors["weights"], counts, case.rows, uniform)
        weight_elements, flops = 3 * inner * hidden, 6 * sum(counts) * inner * hidden
    else:
        gemm = Gemm(tensors["a"], tensors["weights"], tensors["out"], counts)
        contenders = gemm_contenders(gemm, case.rows, uniform)
        weight_elements = tensors["weights"][0][0].numel()
        flops = 2 * sum(counts) * weight_elements
        if invoke is not None and case.rows in args.vllm_rows and uniform:
            w, on_device = gemm.weights[0], gemm.device_counts
            tile = best_vllm_tile(invoke, gemm.a, w, gemm.out, on_device)
            contenders["vllm"] = [vllm_call(invoke, gemm.a, w, gemm.out, on_device, tile) for w in gemm.weights]
            result.note = f"vllm tile {tile}"
    read = sum(1 for count in counts if count) * weight_elements * 2
    result.microseconds = compare(contenders)
    result.tflops = {name: flops / us / 1e6 for name, us in result.microseconds.items()}
    result.weight_tb_per_s = {name: read / us / 1e6 for name, us in result.microseconds.items()}
    return result


def line(result: Result) -> str:
    case, us = result.case, result.microseconds
    ours = us["ours"]
    others = "  ".join(f"{name} {value:8.1f} ({value / ours:5.2f})" for name, value in us.items() if name != "ours")
    return (
        f"{case.model:14s} EP{case.ep:<2d} {case.gemm:4s} {case.skew:8s} {case.rows:5d} rows  ours {ours:8.1f} us "
        f"{result.tflops['ours']:5.0f} TFLOP/s {result.weight_tb_per_s['ours']:5.2f} TB/s  {others}  {result.note}"
    )


def host_microseconds(calls: int = 300) -> float:
    """Median host time of one expert_gemm call on a small problem, nothing waiting on the device."""
    a = torch.randn(16, 64, 512, device=DEVICE, dtype=DTYPE)
    w = torch.randn(16, 512, 512, device=DEVICE, dtype=DTYPE)
    counts = torch.full((16,), 4, dtype=torch.int32, device=DEVICE)
    out = torch.empty(16, 64, 512, device=DEVICE, dtype=DTYPE)
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        expert_gemm(a, w, counts, out=out)
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def run(args: argparse.Namespace) -> list[Result]:
    """Measures, prints one line a case, writes JSON where asked."""
    if not torch.cuda.is_available():
        raise SystemExit("experts_cuda: no CUDA device here; run it on a machine with an NVIDIA GPU")
    torch.manual_seed(args.seed)
    limits = ceilings()
    head = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bf16",
        "capacity": args.capacity,
        "host_us_per_call": host_microseconds(),
        **limits,
    }
    print(
        "  ".join(
            f"{name} {value:.0f}" if isinstance(value, float) else f"{name} {value}" for name, value in head.items()
        )
    )
    invoke = load_vllm_kernel(args.vllm_file) if args.vllm_file else None
    tensors: dict[str, Any] = {}
    results = []
    for case in cases(args):
        results.append(measure(case, args, tensors, invoke))
        print(line(results[-1]), flush=True)
        if args.json:  # after each case: what was measured stays when the run is cut off
            args.json.write_text(json.dumps({**head, "results": [asdict(result) for result in results]}, indent=1))
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ep", nargs="+", type=int, default=list(EP_SIZES))
    parser.add_argument("--gemms", nargs="+", default=["w13", "w2", "mlp"], choices=["w13", "w2", "mlp"])
    parser.add_argument("--skews", nargs="+", default=["uniform", "skewed"], choices=["uniform", "skewed"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="mean rows per expert")
    parser.add_argument("--capacity", type=int, default=4096, help="rows of the batched layout per expert")
    parser.add_argument("--vllm-file", type=Path, help="vLLM's fused_moe/experts/fused_batched_moe.py, to compare with")
    parser.add_argument("--vllm-rows", nargs="+", type=int, default=[16, 1024])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    run(parser.parse_args())
