"""Runs the lowered form of kernels on the CPU and compares with torch; then does the same to wrong copies of them.

A wrong copy is the same module with one operation changed. The comparison must notice, or it proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_ascend_moe.experts.activation import activate
from vllm_ascend_moe.tools.ascend_check.buffers import CUBE_CORES
from vllm_ascend_moe.tools.ascend_check.native import NativeKernel
from vllm_ascend_moe.tools.ascend_check.row_trials import ROW_TRIALS
from vllm_ascend_moe.tools.ascend_check.slot_trials import SLOT_TRIALS
from vllm_ascend_moe.tools.ascend_check.trial import Arguments, Trial

_UNTOUCHED = 7


@dataclass
class Compared:
    """What the comparison found.

    Args:
        error: the largest relative error of a result; planted: how many wrong copies; caught: how many were noticed.
    """

    name: str
    error: float
    tolerance: float
    planted: int = 0
    caught: int = 0

    @property
    def good(self) -> bool:
        return self.error <= self.tolerance and self.planted > 0 and self.caught == self.planted


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (actual.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
    return difference.item() if bool(difference.isfinite()) else float("inf")


# -- trials -----------------------------------------------------------------------------------------------------


def _gemm(
    dtype: torch.dtype,
    activation: str = "none",
    ragged: bool = False,
    bias: bool = False,
    scales: bool = False,
    payload: bool = False,
) -> Trial:
    """A call of the expert GEMM. payload: rows of int8 with a scale each, and weights of ``dtype``."""
    counts, rows, k, n = [50, 0, 33, 1], 51, 72, 84
    parts = 1 if activation == "none" else 2
    generator = torch.Generator().manual_seed(n)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    experts, total = len(counts), sum(counts)
    if dtype == torch.int8:
        a = torch.randint(-127, 128, (experts, rows, k), dtype=dtype, generator=generator)
        w = torch.randint(-127, 128, (experts, parts * n, k), dtype=dtype, generator=generator)
    else:
        a, w = random(experts, rows, k).to(dtype), (random(experts, parts * n, k) * k**-0.5).to(dtype)
        for expert, count in enumerate(counts):
            a[expert, count:] = float("nan")
    if payload:
        a = torch.randint(-127, 128, (experts, rows, k), dtype=torch.int8, generator=generator)
    shift = random(experts, parts * n).bfloat16()
    row_scale, column_scale = random(experts, rows).abs() * 0.02, random(experts, parts * n).abs() * 0.02
    index = torch.tensor(counts, dtype=torch.int32)
    starts = index.cumsum(0, dtype=torch.int32) - index
    own = torch.arange(rows) < index[:, None]
    given = a[own].contiguous() if ragged else a
    out = torch.full((total, n) if ragged else (experts, rows, n), _UNTOUCHED).to(
        torch.bfloat16 if dtype == torch.int8 else dtype
    )
    extra: Arguments = [starts] if ragged else []
    extra += [row_scale] if scales or payload else []
    extra += [column_scale] if scales else []
    extra += [shift] if bias else []
    arguments: Arguments = [given, w, out, given, w, w, index, *extra, experts, given.shape[-2], n, k]
    arguments += [0 if ragged else rows] * 2  # from expert to expert in rows: a, out
    arguments += [0 if ragged else rows * k, k, parts * n * k, n * k, k]
    arguments += [0 if ragged else rows * n, n, rows if scales or payload else 0, n]

    def wanted(expert: int) -> torch.Tensor:
        y = a[expert, : counts[expert]].double() @ w[expert].double().T
        if scales or payload:
            y = y * row_scale[expert, : counts[expert], None]
        if scales:
            y = y * column_scale[expert]
        if bias:
            y = y + shift[expert]
        return y if activation == "none" else activate(y, activation)

    def results() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        exact = torch.cat([wanted(expert) for expert in range(experts)]).to(out.dtype)
        step = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
        pairs = [(out if ragged else out[own], exact, step)]
        if not ragged:
            pairs.append((out[~own], torch.full_like(out[~own], _UNTOUCHED), 0.0))
        return pairs

    return Trial(arguments, results, CUBE_CORES)


def _activation(quantise: bool) -> Trial:
    counts, rows, n = [20, 0, 5], 21, 300
    index = torch.tensor(counts, dtype=torch.int32)
    own = torch.arange(rows) < index[:, None]
    x = torch.randn(3, rows, 2 * n, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[~own] = float("nan")
    out = torch.full((3, rows, n), _UNTOUCHED).to(torch.int8 if quantise else torch.bfloat16)
    scale = torch.full((3, rows), float(_UNTOUCHED))
    arguments: Arguments = [x, out, *([scale] if quantise else []), index, 3, rows, n]
    arguments += [rows * 2 * n, 2 * n, n, rows * n, n, rows, 127.0]

    def results() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        exact = activate(x[own].float(), "silu")
        untouched = (out[~own], torch.full_like(out[~own], _UNTOUCHED), 0.0)
        if not quantise:
            return [(out[own], exact.bfloat16(), 2.0**-8), untouched]
        largest = exact.abs().amax(-1) / 127.0
        return [(scale[own], largest, 1e-6), (out[own], torch.floor(exact / largest[:, None] + 0.5), 2e-3), untouched]

    return Trial(arguments, results)


def _combine() -> Trial:
    tokens, hidden, topk = 9, 300, 8
    generator = torch.Generator().manual_seed(2)
    slots = torch.randint(-1, 30, (tokens, topk), dtype=torch.int32, generator=generator)
    slots[4] = -1
    y = torch.full((30, hidden), float("nan")).bfloat16()
    used = slots[slots >= 0].unique().long()
    y[used] = torch.randn(len(used), hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, topk, generator=generator)
    out = torch.full((tokens, hidden), float(_UNTOUCHED)).bfloat16()
    routed = slots >= 0
    values = torch.where(routed[..., None], y[slots.clamp(min=0).long()].double(), 0.0)
    exact = (values * (weights * routed)[..., None]).sum(1).bfloat16()
    arguments: Arguments = [y, slots, weights, out, tokens, hidden, hidden, topk, topk, hidden]
    return Trial(arguments, lambda: [(out, exact, 2.0**-8), (out[4], torch.zeros(hidden), 0.0)])


def _scatter() -> Trial:
    tokens, hidden, topk = 6, 300, 8
    positions = torch.randperm(tokens * topk, generator=torch.Generator().manual_seed(3)).int().view(tokens, topk)
    positions[2] = -1
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(4)).bfloat16()
    out = torch.full((tokens * topk, hidden), float(_UNTOUCHED)).bfloat16()
    exact = out.clone()
    for token in range(tokens):
        if token != 2:
            exact[positions[token].long()] = x[token]
    return Trial([x, positions, out, tokens, hidden, hidden, hidden], lambda: [(out, exact, 0.0)])


def _routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids with unrouted and unknown ones, a map, the local experts, and counts per block of 64."""
    ids = torch.randint(-1, 22, (192,), generator=torch.Generator().manual_seed(5))
    expert_map = torch.full((20,), -1, dtype=torch.int32)
    expert_map[::2] = torch.arange(10, dtype=torch.int32).flip(0)
    known = (ids >= 0) & (ids < 20)
    local = torch.where(known, expert_map[torch.where(known, ids, 0)].long(), -1)
    counts = torch.stack([torch.bincount(part[part >= 0], minlength=16) for part in local.split(64)]).int()
    return ids, expert_map, local, counts


def _count() -> Trial:
    ids, expert_map, _, counts = _routing()
    out = torch.full((3, 16), _UNTOUCHED, dtype=torch.int32)
    return Trial([ids, expert_map, out, ids.numel(), 20, 10], lambda: [(out, counts, 0.0)])


def _position() -> Trial:
    ids, expert_map, local, counts = _routing()
    positions = torch.full((192,), _UNTOUCHED, dtype=torch.int32)
    total = torch.full((10,), _UNTOUCHED, dtype=torch.int32)
    starts = total.clone()
    exact = torch.full((192,), -1, dtype=torch.int64)
    order = torch.argsort(torch.where(local >= 0, local, 99), stable=True)[: int((local >= 0).sum())]
    exact[order] = torch.arange(len(order))
    wanted = counts.sum(0)[:10]
    arguments: Arguments = [ids, expert_map, counts, positions, total, starts, ids.numel(), 20, 10, 3]
    return Trial(
        arguments,
        lambda: [(positions, exact, 0.0), (total, wanted, 0.0), (starts, wanted.cumsum(0) - wanted, 0.0)],
    )


TRIALS: dict[str, Callable[[], Trial]] = {
    "gemm_bf16": lambda: _gemm(torch.bfloat16),
    "gemm_fp16_ragged_bias": lambda: _gemm(torch.float16, ragged=True, bias=True),
    "gemm_int8_scales": lambda: _gemm(torch.int8, scales=True),
    "gated_silu_bf16": lambda: _gemm(torch.bfloat16, "silu"),
    "gated_silu_int8_by_fp16": lambda: _gemm(torch.float16, "silu", payload=True),
    "gated_swiglu_oai_bf16_bias": lambda: _gemm(torch.bfloat16, "swigluoai_uninterleave", bias=True),
    "swiglu": lambda: _activation(quantise=False),
    "swiglu_int8": lambda: _activation(quantise=True),
    "combine": _combine,
    "scatter_rows": _scatter,
    "count_16": _count,
    "position_16": _position,
    **SLOT_TRIALS,
    **ROW_TRIALS,
}

# -- wrong copies -----------------------------------------------------------------------------------------------

# An operation, what the wrong copy does instead, and which occurrence is changed. Only values and comparisons of
# values are touched, or loops made shorter, so that a wrong copy cannot leave its buffers.
_FAULTS = (
    (r"arith\.addf", "arith.subf", -1),
    (r"arith\.mulf", "arith.addf", -1),
    (r"arith\.maximumf|arith\.maxnumf", "arith.addf", -1),
    (r"arith\.cmpi eq, ", "arith.cmpi ne, ", 0),
    # The sum over K leaves out its first step.
    (r"(scf\.for %\w+ = )%c0_i32( to %\w+ step )(%c\d+_i32)( iter_args)", r"\1\3\2\3\4", 0),
)
# For kernels that have none of the above: the token takes the place of the chunk, or every row is the first.
_LAST_RESORTS = ((r"arith\.divsi", "arith.remsi", -1), (r"arith\.maxsi", "arith.minsi", 0))


def wrong_copies(linalg: str) -> list[str]:
    """Copies of a module, each with one operation changed."""
    copies = [copy for fault in _FAULTS if (copy := _changed(linalg, *fault))]
    return copies or [copy for fault in _LAST_RESORTS if (copy := _changed(linalg, *fault))][:1]


def _changed(linalg: str, pattern: str, instead: str, occurrence: int) -> str | None:
    found = list(re.finditer(pattern, linalg))
    if not found:
        return None
    match = found[occurrence]
    return linalg[: match.start()] + match.expand(instead) + linalg[match.end() :]


def _measure(linalg: str, folder: Path, name: str, make: Callable[[], Trial]) -> tuple[float, float]:
    """(error, tolerance) of the first result that misses its tolerance, else of the trial's main result."""
    kernel = NativeKernel(linalg, folder, name)
    trial = make()
    kernel(trial.arguments, trial.programs)
    found = [(relative_error(actual, wanted), tolerance) for actual, wanted, tolerance in trial.results()]
    missed = [pair for pair in found if pair[0] > pair[1]]
    return (missed or found)[0]


def compare(name: str, linalg: str, folder: Path) -> Compared:
    """Runs one kernel and its wrong copies."""
    make = TRIALS[name]
    result = Compared(name, *_measure(linalg, folder, name, make))
    for number, wrong in enumerate(wrong_copies(linalg)):
        result.planted += 1
        error, tolerance = _measure(wrong, folder, f"{name}.wrong{number}", make)
        result.caught += error > tolerance
    return result
