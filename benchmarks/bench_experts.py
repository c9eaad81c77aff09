"""Speed of the expert MLP on CPU: ours against vLLM's cpu_fused_moe, a torch loop, and the limits of the machine.

    python benchmarks/bench_experts.py                      # the best instructions this processor has
    python benchmarks/bench_experts.py --isa avx2           # both sides as on a processor with AVX2 only
    python benchmarks/bench_experts.py --device cuda ...    # the Triton kernels (see experts_cuda.py for its options)

All contenders of a case compute the same rows with the same bf16 weights, in turn, over several sets of inputs that
choose different experts; each result is compared with the fp32 reference first. ``limit_ms`` is the larger of the
flops over the fastest matrix product of this run and the chosen experts' bytes over the read bandwidth of this run.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package, where it is not installed

from measure import Work, environment, interleaved, spread, table, write_json

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NativeExperts, available_isas, pack_weights
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.experts.torch_form import TorchExperts
from vllm_ascend_moe.testing.compare import relative_error

SHAPES = {
    "16,2048,768,4": (16, 2048, 768, 4),
    "8,1024,1024,2": (8, 1024, 1024, 2),
    "64,2048,1408,6": (64, 2048, 1408, 6),
}
COLUMNS = ["E,H,N,K", "T", "vllm_ms", "ours_ms", "vllm/ours", "unpacked_ms", "torch_ms", "limit_ms", "ours/limit",
           "GF/s", "GB/s"]  # fmt: skip
REPEATS = {1: 200, 8: 60, 64: 25, 512: 9}


@dataclass(frozen=True)
class Inputs:
    hidden: torch.Tensor  # bf16 [T, H]
    weights: torch.Tensor  # fp32 [T, K]
    ids: torch.Tensor  # int32 [T, K], distinct in a row

    @staticmethod
    def make(tokens: int, hidden_size: int, experts: int, top_k: int) -> Inputs:
        ids = torch.rand(tokens, experts).topk(top_k).indices.to(torch.int32)
        return Inputs(torch.randn(tokens, hidden_size).bfloat16(), torch.rand(tokens, top_k), ids)


def vllm_library(isa: str) -> Path | None:
    """The build of vLLM's CPU kernels that vLLM would load on a processor with these instructions."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    name = {"avx512_bf16": "_C", "avx512": "_C_AVX512", "avx2": "_C_AVX2"}.get(isa, "_C")
    path = Path(spec.submodule_search_locations[0]) / f"{name}.abi3.so"
    return path if path.exists() else None


def vllm_kernel(isa: str) -> Any:
    """vLLM's operators, or None. Loaded as a library: importing vLLM would start its platform detection."""
    path = vllm_library(isa)
    if path is None:
        return None
    torch.ops.load_library(str(path))
    return torch.ops._C


def vllm_work(kernel: Any, form: str, weights: ExpertWeights, inputs: list[Inputs], out: torch.Tensor) -> Work:
    """``form``: "amx", which vLLM takes where the processor has AMX, or "vec"."""
    packed = [torch.empty_like(w) for w in (weights.w13, weights.w2)]
    for source, target in zip((weights.w13, weights.w2), packed, strict=True):
        kernel.prepack_moe_weight(source, target, form)

    def work(repeat: int) -> torch.Tensor:
        x = inputs[repeat % len(inputs)]
        kernel.cpu_fused_moe(out, x.hidden, *packed, None, None, x.weights, x.ids, False, "silu", form)
        return out

    return work


def our_work(experts: Any, weights: ExpertWeights, inputs: list[Inputs], out: torch.Tensor) -> Work:
    def work(repeat: int) -> torch.Tensor:
        x = inputs[repeat % len(inputs)]
        return experts.apply(x.hidden, x.weights, x.ids, weights, out=out)

    return work


def machine_limits() -> dict[str, float]:
    """Matrix products in GF/s and memory in GB/s, measured now."""
    n = 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    a16, b16 = a.bfloat16(), b.bfloat16()
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    seconds = interleaved(
        {
            "sgemm GF/s": lambda _: a @ b,
            "bf16 linear GF/s": lambda _: torch.nn.functional.linear(a16, b16),
            "copy GB/s": lambda _: target.copy_(source),
            "read GB/s": lambda _: source.sum(),
        },
        7,
    )
    work = {
        "sgemm GF/s": 2 * n**3,
        "bf16 linear GF/s": 2 * n**3,
        "copy GB/s": 2 * source.nbytes,
        "read GB/s": source.nbytes,
    }
    return {name: work[name] / min(times) / 1e9 for name, times in seconds.items()}


def check(works: dict[str, Work], weights: ExpertWeights, inputs: list[Inputs]) -> dict[str, float]:
    """Relative error of each contender on the first inputs; raises where one is not the expert MLP."""
    x = inputs[0]
    rows = slice(0, 32)
    want = ReferenceExperts().apply(x.hidden[rows], x.weights[rows], x.ids[rows], weights)
    errors = {name: relative_error(work(0)[rows], want) for name, work in works.items()}
    for name, error in errors.items():
        if not error < 2e-2:
            raise AssertionError(f"{name}: relative error {error:.3g}")
    return errors


def run_shape(shape: str, args: argparse.Namespace, kernel: Any, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    experts, hidden_size, inner, top_k = SHAPES[shape]
    w13 = (torch.randn(experts, 2 * inner, hidden_size) / hidden_size**0.5).bfloat16()
    w2 = (torch.randn(experts, hidden_size, inner) / inner**0.5).bfloat16()
    plain = ExpertWeights(w13=w13, w2=w2)
    packed = pack_weights(ExpertWeights(w13=w13.clone(), w2=w2.clone()))
    ours = NativeExperts(args.isa)
    for tokens in args.tokens:
        inputs = [Inputs.make(tokens, hidden_size, experts, top_k) for _ in range(16 if tokens == 1 else 4)]
        out = torch.empty(tokens, hidden_size, dtype=torch.bfloat16)
        works = {"ours": our_work(ours, packed, inputs, out), "unpacked": our_work(ours, plain, inputs, out)}
        if kernel is not None:
            works["vllm"] = vllm_work(kernel, args.vllm_form, plain, inputs, out)
        if args.torch_loop:
            works["torch"] = our_work(TorchExperts(), plain, inputs, out)
        errors = check(works, plain, inputs)
        times = {name: spread(seconds, 1e3) for name, seconds in interleaved(works, REPEATS.get(tokens, 9)).items()}
        yield make_row(shape, tokens, inputs, times, limits) | {"errors": errors}


def make_row(
    shape: str, tokens: int, inputs: list[Inputs], times: dict[str, dict[str, float]], limits: dict[str, float]
) -> dict[str, Any]:
    _, hidden_size, inner, top_k = SHAPES[shape]
    per_expert = 3 * hidden_size * inner
    flops = 2.0 * tokens * top_k * per_expert
    chosen = sum(len(x.ids.unique()) for x in inputs) / len(inputs)
    weight_bytes = 2 * per_expert * chosen
    peak = max(limits["sgemm GF/s"], limits["bf16 linear GF/s"])
    limit = max(flops / peak, weight_bytes / limits["read GB/s"]) / 1e6
    ours = times["ours"]["median"]
    row: dict[str, Any] = {"E,H,N,K": shape, "T": tokens, "times": times, "limit_ms": round(limit, 2)}
    row |= {f"{name}_ms": round(t["median"], 2) for name, t in times.items()}
    row |= {
        "ours/limit": round(ours / limit, 2),
        "GF/s": round(flops / ours / 1e6),
        "GB/s": round(weight_bytes / ours / 1e6, 1),
    }
    if "vllm" in times:
        row["vllm/ours"] = round(times["vllm"]["median"] / ours, 2)
    return row


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--isa", default="", help='"amx_bf16", "avx512_bf16", "avx512", "avx2", "portable" [the best]')
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="E,H,N,K")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--torch-loop", action="store_true", help="also time the plain torch form")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_known_args()


def main() -> None:
    args, rest = parse_args()
    if args.device == "cuda":
        script = Path(__file__).with_name("experts_cuda.py")
        raise SystemExit(subprocess.run([sys.executable, str(script), *rest], check=False).returncode)
    if rest:
        raise SystemExit(f"unknown arguments: {rest}")
    torch.manual_seed(0)
    isa = args.isa or next(iter(available_isas(torch.bfloat16)), "")
    kernel = vllm_kernel(isa)
    args.vllm_form = "amx" if isa == "amx_bf16" else "vec"
    limits = machine_limits()
    rows = [row for shape in args.shapes for row in run_shape(shape, args, kernel, limits)]
    path = args.out / f"experts_cpu_{isa or 'torch'}.json"
    write_json(path, shlex.join(["python", "benchmarks/bench_experts.py", *sys.argv[1:]]), rows, limits=limits, isa=isa)
    print({**environment(), "isa": isa, **{name: round(value, 1) for name, value in limits.items()}})
    print(table(rows, COLUMNS))
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
