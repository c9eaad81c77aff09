"""The kernels to check: as they run on Ascend A2, and in small tiles for the comparison with torch. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

import triton.language as tl

from vllm_ascend_moe.kernels.tiles import TILE_TABLE
from vllm_ascend_moe.tools.ascend_check.gemm_specs import GemmCase, gemm_cases, gemm_spec
from vllm_ascend_moe.tools.ascend_check.row_specs import row_specs
from vllm_ascend_moe.tools.ascend_check.sent_row_specs import pack_layout, sent_row_specs
from vllm_ascend_moe.tools.ascend_check.spec import KernelSpec


def all_specs() -> list[KernelSpec]:
    """Every kernel of the package as it runs on Ascend A2, and tiles that must be refused."""
    return [gemm_spec(name, case) for name, case in gemm_cases().items()] + row_specs() + sent_row_specs()


def numeric_specs() -> list[KernelSpec]:
    """The kernels whose lowered form is run against torch: small tiles, since every element is computed on a CPU."""
    small = replace(TILE_TABLE["ascend", 2], block_m=32, block_n=64, block_k=32)
    gated = GemmCase(activation="silu", gated=True, tiles=small)
    cases = {
        "gemm_bf16": GemmCase(tiles=small),
        "gemm_fp16_ragged_bias": GemmCase(dtype="fp16", ragged=True, bias=True, tiles=small),
        "gemm_int8_scales": GemmCase(dtype="i8", scales=True, tiles=small),
        "gated_silu_bf16": gated,
        "gated_silu_int8_by_fp16": replace(gated, payload="i8", dtype="fp16"),
        "gated_swiglu_oai_bf16_bias": replace(gated, activation="swiglu_oai", bias=True),
    }
    names = ("swiglu", "swiglu_int8", "combine", "scatter_rows", "count_16", "position_16")
    specs = [gemm_spec(name, case) for name, case in cases.items()] + [s for s in row_specs() if s.name in names]
    return [*specs, *_slot_numeric(), *_sent_row_numeric()]


def _slot_numeric() -> list[KernelSpec]:
    """Small tiles, so that there are several."""
    sizes = {"TOPK": 3, "ROWS": 16, "E_BLOCK": 16}
    specs = {spec.name: spec for spec in row_specs()}
    return [replace(specs[name], constants=sizes) for name in ("slot_count_16", "slot_16")]


def _sent_row_numeric() -> list[KernelSpec]:
    """Small tiles, so that there are several; the code fits 32 bits, which is what the CPU's call passes."""
    specs = {spec.name: spec for spec in sent_row_specs()}
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
