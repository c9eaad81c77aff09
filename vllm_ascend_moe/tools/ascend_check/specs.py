"""The kernels to check: types, constants and tiles as the launches pass them for Ascend A2. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl

from vllm_ascend_moe.kernels import gemm, rows, sent_row_kernels
from vllm_ascend_moe.kernels.tiles import COPY_LANES, PLAN_TILE, ROW_TILES, TILE_TABLE, GemmTiles, ascend_tiles
from vllm_ascend_moe.tools.ascend_check.buffers import CUBE_CORES

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i8": 1}
_ROWS = ROW_TILES["ascend"]


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with everything that is fixed at compile time.

    Args:
        name: in the report and in file names.
        kernel: the ``triton.jit`` function.
        types: of the arguments that are not int32; constants: constexpr arguments, and None for absent pointers.
        overflows: the buffer that this tile is known not to fit, where the check is that it is refused.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    tile: str
    overflows: str = ""

    def signature(self) -> dict[str, str]:
        """The Triton type of each argument that is not a constant."""
        names = self.kernel.arg_names
        return {name: self.types.get(name, "i32") for name in names if name not in self.constants}


@dataclass(frozen=True)
class GemmCase:
    """How one expert GEMM differs from the plain one."""

    dtype: str = "bf16"
    activation: str = "none"
    gated: bool = False
    ragged: bool = False
    bias: bool = False
    scales: bool = False
    experts: int = 16
    tiles: GemmTiles | None = None
    overflows: str = ""
    out: str = ""  # dtype of the result; bf16 for int8 operands


def gemm_spec(name: str, case: GemmCase) -> KernelSpec:
    """A case of expert_gemm_kernel, with the table's tiles unless the case has its own."""
    parts = 2 if case.gated else 1
    tiles = case.tiles or ascend_tiles(TILE_TABLE["ascend", _BYTES[case.dtype]], case.activation, parts)
    pointer = f"*{case.dtype}"
    types = dict.fromkeys(("a", "b", "a_few", "b_half", "b_few"), pointer)
    types |= {"c": f"*{case.out or ('bf16' if case.dtype == 'i8' else case.dtype)}", "counts_ptr": "*i32"}
    types |= {"starts": "*i32", "a_scale": "*fp32", "b_scale": "*fp32", "bias": "*bf16"}
    constants: dict[str, Any] = {
        "PROGRAMS": CUBE_CORES,
        "E_BLOCK": case.experts,
        "SCAN": tiles.scan,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n // parts,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": tiles.group_m,
        "STAGES": tiles.stages,
        "HALVES": tiles.halves,
        "FEW_M": tiles.few_m,
        "FEW_N": tiles.few_n // parts,
        "FEW_K": tiles.few_k,
        "FEW_STAGES": tiles.few_stages,
        "NARROW_STAGES": tiles.narrow_stages,
        "STEP": 1,
        "PARTS": parts,
        "ACTIVATION": case.activation,
        "ACC": tl.int32 if case.dtype == "i8" else tl.float32,
        "IMPRECISE": None,
        "TMA": tiles.tma,
        "WIDEN": False,
        "c_whole": None,
        "PIECES": 0,
        "FLATTEN": False,
        "EARLY": False,
    }
    if not case.ragged:
        constants["starts"] = None
    if not case.bias:
        constants["bias"] = None
    if not case.scales:
        constants |= {"a_scale": None, "b_scale": None}
    tile = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
    return KernelSpec(name, gemm.expert_gemm_kernel, types, constants, tile, case.overflows)


def _gemm_cases() -> dict[str, GemmCase]:
    gated = GemmCase(activation="silu", gated=True)
    big = TILE_TABLE["ascend", 2]
    return {
        "gemm_bf16": GemmCase(),
        "gemm_bf16_ragged_bias": GemmCase(ragged=True, bias=True),
        "gemm_fp16": GemmCase(dtype="fp16"),
        "gemm_fp32": GemmCase(dtype="fp32"),
        "gemm_int8_scales": GemmCase(dtype="i8", scales=True),
        "gemm_bf16_relu2": GemmCase(activation="relu2"),
        "gemm_bf16_silu": GemmCase(activation="silu"),
        "gated_silu_bf16": gated,
        "gated_silu_bf16_ragged_bias": replace(gated, ragged=True, bias=True),
        "gated_silu_bf16_256_experts": replace(gated, experts=256),
        "gated_silu_fp16": replace(gated, dtype="fp16"),
        "gated_silu_fp32": replace(gated, dtype="fp32"),
        "gated_silu_int8_scales": replace(gated, dtype="i8", scales=True),
        "gated_gelu_bf16": replace(gated, activation="gelu"),
        "gated_gelu_tanh_bf16": replace(gated, activation="gelu_tanh"),
        "gated_swiglu_oai_bf16_bias": replace(gated, activation="swiglu_oai", bias=True),
        "too_big_for_l0c": GemmCase(tiles=replace(big, block_m=256), overflows="L0C"),
        "too_big_for_l1": GemmCase(tiles=replace(big, block_k=1024), overflows="L1"),
        "too_big_for_ub": replace(gated, activation="relu2", gated=False, tiles=big, overflows="UB"),
    }


def _row_specs() -> list[KernelSpec]:
    tile = {"ROWS": _ROWS.rows, "COLUMNS": _ROWS.columns, "E_BLOCK": 16, "SCAN": _ROWS.scan, "STEP": 1}
    area = f"{_ROWS.rows}x{_ROWS.columns}"
    pointers = {"x": "*bf16", "out": "*bf16", "scale": "*fp32", "counts_ptr": "*i32", "starts": "*i32", "limit": "fp32"}
    silu = {"PARTS": 2, "ACTIVATION": "silu", "starts": None, **tile}
    plain = {"PARTS": 1, "ACTIVATION": "none", **tile}
    specs = [
        KernelSpec("swiglu", rows.activate_kernel, pointers, {**silu, "INTEGER": False, "scale": None}, area),
        KernelSpec("swiglu_int8", rows.activate_kernel, pointers | {"out": "*i8"}, {**silu, "INTEGER": True}, area),
        KernelSpec(
            "quantise_int8_ragged", rows.activate_kernel, pointers | {"out": "*i8"}, {**plain, "INTEGER": True}, area
        ),
    ]
    columns = {"TOPK": 8, "COLUMNS": _ROWS.columns}
    combine = {"y": "*bf16", "slots": "*i32", "weights": "*fp32", "out": "*bf16"}
    specs.append(KernelSpec("combine", rows.combine_kernel, combine, columns, f"{_ROWS.columns}"))
    scatter = {"x": "*bf16", "out": "*bf16", "scale": "*fp32", "out_scale": "*fp32", "positions": "*i32"}
    bare = {**columns, "scale": None, "out_scale": None}
    specs.append(KernelSpec("scatter_rows", rows.scatter_rows_kernel, scatter, bare, f"{_ROWS.columns}"))
    payload = scatter | {"x": "*i8", "out": "*i8"}
    specs.append(KernelSpec("scatter_rows_int8", rows.scatter_rows_kernel, payload, columns, f"{_ROWS.columns}"))
    plan = {"ids": "*i64", "expert_map": "*i32", "block_counts": "*i32", "positions": "*i32"}
    plan |= {"counts": "*i32", "starts": "*i32"}
    for experts in (16, 256):
        sizes = {"BLOCK": _ROWS.choices, "E_BLOCK": experts}
        area = f"{_ROWS.choices}x{experts}"
        specs.append(KernelSpec(f"count_{experts}", rows.count_kernel, plan, sizes, area))
        specs.append(KernelSpec(f"position_{experts}", rows.position_kernel, plan, sizes, area))
    alone = {"BLOCK": _ROWS.choices, "E_BLOCK": 16, "block_counts": None, "expert_map": None}
    specs.append(KernelSpec("position_one_block", rows.position_kernel, plan, alone, f"{_ROWS.choices}x16"))
    return specs


def _sent_row_specs() -> list[KernelSpec]:
    """The kernels of the all-to-all by row: DeepSeek-V3's sizes in bf16, with and without scales."""
    plan = {"ids": "*i32", "owners": "*i32", "block_counts": "*i32", "entries": "*i32", "slots": "*i32"}
    plan |= {"codes": "*i64", "code": "i64"}
    specs = []
    for ranks in (8, 32, 256):
        tokens = PLAN_TILE["ascend"] // ranks
        sizes, area = {"TOPK": 8, "ROWS": tokens, "R_BLOCK": ranks, "UNROLL": 1}, f"{tokens}x{ranks}"
        placed = {**sizes, "WIDTH": 8}
        specs.append(KernelSpec(f"row_count_{ranks}", sent_row_kernels.row_count_kernel, plan, sizes, area))
        specs.append(KernelSpec(f"row_plan_{ranks}", sent_row_kernels.row_plan_kernel, plan, placed, area))
    wide = plan | {"ids": "*i64", "entries": "*i64"}
    alone: dict[str, Any] = {"TOPK": 8, "ROWS": 32, "R_BLOCK": 8, "UNROLL": 1, "WIDTH": 8, "block_counts": None}
    specs.append(KernelSpec("row_plan_one_launch", sent_row_kernels.row_plan_kernel, wide, alone, "32x8"))
    lanes = COPY_LANES["ascend"]
    words = dict.fromkeys(("x", "weights", "entries", "scales", "slots", "wire"), "*i32")
    for name, columns in {"pack_rows": (3584, 8, 8), "pack_rows_scales": (1792, 8, 8, 1)}.items():
        constants = {"WORD": tl.int32, "WIDTH": 8, **pack_layout(columns, lanes)}
        if len(columns) == 3:
            constants["scales"] = None
        specs.append(KernelSpec(name, sent_row_kernels.pack_rows_kernel, words, constants, f"{lanes}"))
    for size in (32, 64):
        ids = dict.fromkeys(("index", "table", "out"), f"*i{size}")
        tile = {"TOPK": 8, "ROWS": 128, "K_BLOCK": 8}
        specs.append(KernelSpec(f"look_up_{size}", sent_row_kernels.look_up_kernel, ids, tile, "128x8"))
    return specs


def pack_layout(columns: tuple[int, ...], lanes: int) -> dict[str, int]:
    """Sizes of pack_rows_kernel for dense columns of so many words, which follow each other."""
    layout = {"PITCH": -(-sum(columns) // 4) * 4, "CHUNKS": -(-columns[0] // lanes), "LANES": lanes}
    layout |= {"X_COUNT": columns[0], "X_STRIDE": columns[0]}
    start = columns[0]
    for name, count in zip("WES", (*columns[1:], 0, 0), strict=False):
        layout |= {f"{name}_START": start, f"{name}_COUNT": count, f"{name}_STRIDE": count}
        layout[f"{name}_LANES"] = 1 << max(0, count - 1).bit_length()
        start += count
    return layout


def all_specs() -> list[KernelSpec]:
    """Every kernel of the package as it runs on Ascend A2, and tiles that must be refused."""
    return [gemm_spec(name, case) for name, case in _gemm_cases().items()] + _row_specs() + _sent_row_specs()


def numeric_specs() -> list[KernelSpec]:
    """The kernels whose lowered form is run against torch: small tiles, since every element is computed on a CPU."""
    small = replace(TILE_TABLE["ascend", 2], block_m=32, block_n=64, block_k=32)
    gated = GemmCase(activation="silu", gated=True, tiles=small)
    cases = {
        "gemm_bf16": GemmCase(tiles=small),
        "gemm_fp16_ragged_bias": GemmCase(dtype="fp16", ragged=True, bias=True, tiles=small),
        "gemm_int8_scales": GemmCase(dtype="i8", scales=True, tiles=small),
        "gated_silu_bf16": gated,
        "gated_swiglu_oai_bf16_bias": replace(gated, activation="swiglu_oai", bias=True),
    }
    names = ("swiglu", "swiglu_int8", "combine", "scatter_rows", "count_16", "position_16")
    specs = [gemm_spec(name, case) for name, case in cases.items()] + [s for s in _row_specs() if s.name in names]
    return specs + _sent_row_numeric()


def _sent_row_numeric() -> list[KernelSpec]:
    """Small tiles, so that there are several; the code fits 32 bits, which is what the CPU's call passes."""
    specs = {spec.name: spec for spec in _sent_row_specs()}
    small, words = (
        {"TOPK": 3, "ROWS": 16, "R_BLOCK": 8, "UNROLL": 1},
        {"WORD": tl.int32, "WIDTH": 3, **pack_layout((70, 3, 3), 128)},
    )
    plan = replace(specs["row_plan_8"], types=specs["row_plan_8"].types | {"code": "i32"})
    return [
        replace(specs["row_count_8"], constants=small),
        replace(plan, constants={**small, "WIDTH": 3}),
        replace(plan, name="row_plan_one_launch", constants={**small, "WIDTH": 3, "block_counts": None}),
        replace(specs["pack_rows"], constants={**words, "scales": None}),
        replace(specs["look_up_32"], constants={"TOPK": 3, "ROWS": 16, "K_BLOCK": 4}),
    ]
