"""What is compiled: the package's own launching functions, with the operands and tiles that they get in use.

Symbols: E_l experts; H hidden size; N expert intermediate size. Sizes are those of DeepSeek-V3 at EP 32 (they decide
alignment and, through the tile table, tiles; loops over them stay loops).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.permute import permute_rows, plan_permutation
from vllm_ascend_moe.kernels.quantize import activate_rows
from vllm_ascend_moe.kernels.sent_rows import look_up, pack_rows, plan_rows, sum_rows
from vllm_ascend_moe.kernels.slots import plan_slots
from vllm_ascend_moe.kernels.tiles import HOPPER_16BIT, TILE_TABLE, GemmTiles

HOPPER, AMPERE, BLACKWELL = 90, 80, 100
_EXPERTS, _ROWS, _HIDDEN, _INNER, _TOPK = 8, 256, 7168, 2048, 8
_FP8 = torch.float8_e4m3fn
_COPIES, _STORES = "cp.async.bulk.tensor", "cp.async.bulk.tensor.2d.global"
_WGMMA, _MMA, _EARLY = "wgmma.mma_async", "mma.sync", "griddepcontrol"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, which may launch several kernels.

    Args:
        call: launches them. capability: of the GPU.
        programs: how many a multiprocessor has to hold at a time, by the tile table.
        uses: instructions that must be in the first kernel's PTX.
        refused: "" or what a case that is wrong on purpose must be refused for: a key of
            resources.limits_passed, or "instructions".
    """

    call: Callable[[], object]
    capability: int = HOPPER
    programs: int = 1
    uses: tuple[str, ...] = ()
    refused: str = ""


def cases() -> dict[str, Case]:
    """Every case by name. The same in every process."""
    return {**_hopper_tables(), **_hopper_types(), **_other_gpus(), **_rows(), **_wrong()}


def _gemm(
    dtype: torch.dtype,
    activation: str = "none",
    *,
    tiles: GemmTiles | None = None,
    payload: torch.dtype | None = None,
    ragged: bool = False,
    bias: bool = False,
    scales: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Callable[[], object]:
    """The first GEMM of an expert MLP (gate and up), or with an ungated activation one of the same sizes."""

    def call() -> object:
        a = torch.empty((_EXPERTS * _ROWS, _HIDDEN) if ragged else (_EXPERTS, _ROWS, _HIDDEN), dtype=payload or dtype)
        w = torch.empty(_EXPERTS, 2 * _INNER, _HIDDEN, dtype=dtype)
        counts = torch.empty(_EXPERTS, dtype=torch.int32)
        return expert_gemm(
            a,
            w,
            counts,
            starts=counts if ragged else None,
            activation=activation,
            a_scale=torch.empty(a.shape[:-1]) if scales or payload else None,
            w_scale=torch.empty(w.shape[:2]) if scales else None,
            bias=torch.empty(w.shape[:2], dtype=torch.bfloat16) if bias else None,
            out_dtype=out_dtype,
            tiles=tiles,
        )

    return call


def _hopper_tables() -> dict[str, Case]:
    """Every row of the table for 16-bit weights, plain and gated."""
    found = {}
    for row, tiles in HOPPER_16BIT.items():
        for activation in ("none", "silu"):
            uses = [_WGMMA, _COPIES] + [_EARLY] * tiles.early + [_STORES] * (tiles.store_n > 0)
            call = _gemm(torch.bfloat16, activation, tiles=tiles)
            found[f"gemm {row} {activation}"] = Case(call=call, programs=tiles.programs, uses=tuple(uses))
    return found


def _hopper_types() -> dict[str, Case]:
    uses = (_WGMMA, _COPIES)
    two = TILE_TABLE["hopper", 2].programs
    bf16, fp16, int8 = torch.bfloat16, torch.float16, torch.int8
    return {
        "gemm fp16 ragged bias gelu": Case(call=_gemm(fp16, "gelu", ragged=True, bias=True), programs=two, uses=uses),
        "gemm bf16 bias swigluoai": Case(call=_gemm(bf16, "swigluoai", bias=True), programs=two, uses=uses),
        # Results wider than the weights leave room for one program.
        "gemm bf16 to fp32": Case(call=_gemm(bf16, out_dtype=torch.float32), uses=uses),
        "gemm int8 scales silu": Case(call=_gemm(int8, "silu", scales=True), programs=two, uses=uses),
        "gemm fp8 scales silu": Case(call=_gemm(_FP8, "silu", scales=True), programs=two, uses=uses),
        "gemm int8 by bf16 silu": Case(call=_gemm(bf16, "silu", payload=int8), uses=(_COPIES,)),
        "gemm fp32 silu": Case(call=_gemm(torch.float32, "silu")),
    }


def _other_gpus() -> dict[str, Case]:
    found = {}
    for name, capability in (("Ampere", AMPERE), ("Blackwell", BLACKWELL)):
        for dtype, uses in ((torch.bfloat16, (_MMA,)), (torch.int8, (_MMA,)), (torch.float32, ())):
            scales = dtype == torch.int8
            call = _gemm(dtype, "silu", scales=scales)
            # What multiplies on Blackwell is Triton's choice.
            wanted = uses if capability == AMPERE else ()
            short = str(dtype).removeprefix("torch.")
            found[f"gemm {name} {short} silu"] = Case(call=call, capability=capability, uses=wanted)
    return found


def _rows() -> dict[str, Case]:
    """The kernels that copy, sort, sum and quantise rows."""
    tokens, experts = 4096, 256
    hidden = torch.empty(tokens, _HIDDEN, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, _TOPK, dtype=torch.int64)
    weights = torch.empty(tokens, _TOPK)
    expert_map = torch.zeros(experts, dtype=torch.int32)
    owners = torch.zeros(experts + 2, dtype=torch.int32)
    slots = torch.zeros(tokens, _TOPK, dtype=torch.int32)
    counts = torch.empty(_EXPERTS, dtype=torch.int32)
    gate_up = torch.empty(_EXPERTS, _ROWS, 2 * _INNER, dtype=torch.bfloat16)
    wire = [torch.empty(tokens, _HIDDEN, dtype=torch.int8), weights, ids, torch.empty(tokens)]
    places = (0, _HIDDEN, _HIDDEN + 32, _HIDDEN + 96)
    calls: dict[str, Callable[[], object]] = {
        "activate silu": lambda: activate_rows(gate_up, counts),
        "activate silu to int8": lambda: activate_rows(gate_up, counts, quantize_to=torch.int8),
        "activate silu to fp8": lambda: activate_rows(gate_up, counts, quantize_to=_FP8),
        "combine": lambda: combine(hidden, slots, weights),
        "plan permutation": lambda: plan_permutation(ids, _EXPERTS, expert_map),
        "permute": lambda: permute_rows(hidden, plan_permutation(ids[:, :1], _EXPERTS, expert_map)),
        "plan slots": lambda: plan_slots(ids, expert_map, _EXPERTS),
        "plan sent rows": lambda: plan_rows(ids, owners, 32),
        "plan few sent rows": lambda: plan_rows(ids[:32], owners, 32),
        "pack rows": lambda: pack_rows([hidden, weights, ids], (0, 2 * _HIDDEN, 2 * _HIDDEN + 32), 14_464, slots, 32),
        "pack rows int8": lambda: pack_rows(wire, places, 7_280, slots, 32),
        "look up ids": lambda: look_up(ids, torch.zeros(experts, dtype=torch.int64)),
        "sum rows": lambda: sum_rows(hidden, slots),
    }
    return {name: Case(call=call) for name, call in calls.items()}


def _wrong() -> dict[str, Case]:
    """Tiles that cannot be good, and instructions that are not there: the check must say so."""
    some, many, once = (HOPPER_16BIT[row] for row in ("any_rows", "many_rows", "one_round"))
    tiles = {
        "too many stages": (replace(many, stages=8), "shared memory", ()),
        "too few warps": (replace(many, warps=4, stages=3), "spills", ()),
        "too many programs": (replace(many, programs=2), "programs", ()),
        "read through pointers": (replace(some, tma=False), "instructions", (_COPIES,)),
        "stored through pointers": (replace(some, store_n=0), "instructions", (_STORES,)),
        "not launched early": (replace(once, early=False), "instructions", (_EARLY,)),
    }
    found = {
        name: Case(call=_gemm(torch.bfloat16, tiles=row), programs=row.programs, refused=refused, uses=uses)
        for name, (row, refused, uses) in tiles.items()
    }
    exact = _gemm(torch.float32)
    return {**found, "fp32 without the matrix unit": Case(call=exact, refused="instructions", uses=(_WGMMA,))}
