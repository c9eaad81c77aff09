"""The expert GEMM: types, constants and tiles as its launch passes them for Ascend A2. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl

from vllm_ascend_moe.kernels.gemm import expert_gemm_kernel
from vllm_ascend_moe.kernels.tiles import TILE_TABLE, GemmTiles, ascend_tiles
from vllm_ascend_moe.tools.ascend_check.buffers import CUBE_CORES
from vllm_ascend_moe.tools.ascend_check.spec import KernelSpec

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i8": 1}


@dataclass(frozen=True)
class GemmCase:
    """How one expert GEMM differs from the plain one."""

    dtype: str = "bf16"
    activation: str = "none"
    gated: bool = False
    ragged: bool = False
    bias: bool = False
    scales: bool = False
    payload: str = ""  # dtype of the rows, with a scale each, where it is not that of the weights
    interleaved: bool = False  # gate and up take turns in the weights
    experts: int = 16
    tiles: GemmTiles | None = None
    overflows: str = ""
    out: str = ""  # dtype of the result; bf16 for int8 operands


def gemm_spec(name: str, case: GemmCase) -> KernelSpec:
    """A case of expert_gemm_kernel, with the table's tiles unless the case has its own."""
    parts = 2 if case.gated else 1
    tiles = case.tiles or ascend_tiles(TILE_TABLE["ascend", _BYTES[case.dtype]], case.activation, parts)
    types = dict.fromkeys(("b", "b_half", "b_few"), f"*{case.dtype}")
    types |= dict.fromkeys(("a", "a_few"), f"*{case.payload or case.dtype}")
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
        "STEP": 2 if case.interleaved else 1,
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
        constants["b_scale"] = None
        if not case.payload:
            constants["a_scale"] = None
    tile = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
    return KernelSpec(name, expert_gemm_kernel, types, constants, tile, case.overflows)


def gemm_cases() -> dict[str, GemmCase]:
    """The GEMMs of expert MLPs, of every type and activation, and tiles that must be refused."""
    return {**_plain(), **_gated(), **_quantised(), **_too_big()}


def _plain() -> dict[str, GemmCase]:
    return {
        "gemm_bf16": GemmCase(),
        "gemm_bf16_ragged_bias": GemmCase(ragged=True, bias=True),
        "gemm_fp16": GemmCase(dtype="fp16"),
        "gemm_fp32": GemmCase(dtype="fp32"),
        "gemm_bf16_silu": GemmCase(activation="silu"),
        "gemm_bf16_gelu": GemmCase(activation="gelu"),
        "gemm_bf16_gelu_tanh": GemmCase(activation="gelu_tanh"),
        "gemm_bf16_relu2": GemmCase(activation="relu2"),
        "gemm_bf16_relu2_bias": GemmCase(activation="relu2", bias=True),
        "gemm_fp32_gelu_bias": GemmCase(activation="gelu", dtype="fp32", bias=True),
    }


_GATED = GemmCase(activation="silu", gated=True)
_OAI = replace(_GATED, activation="swiglu_oai", bias=True)


def _gated() -> dict[str, GemmCase]:
    return {
        "gated_silu_bf16": _GATED,
        "gated_silu_bf16_ragged_bias": replace(_GATED, ragged=True, bias=True),
        "gated_silu_bf16_256_experts": replace(_GATED, experts=256),
        "gated_silu_fp16": replace(_GATED, dtype="fp16"),
        "gated_silu_fp32": replace(_GATED, dtype="fp32"),
        "gated_gelu_bf16": replace(_GATED, activation="gelu"),
        "gated_gelu_bf16_bias": replace(_GATED, activation="gelu", bias=True),
        "gated_gelu_fp32": replace(_GATED, activation="gelu", dtype="fp32"),
        "gated_gelu_tanh_bf16": replace(_GATED, activation="gelu_tanh"),
        "gated_relu2_bf16": replace(_GATED, activation="relu2"),
        "gated_swiglu_oai_bf16_bias": _OAI,
        "gated_swiglu_oai_bf16_bias_interleaved": replace(_OAI, interleaved=True),
    }


def _quantised() -> dict[str, GemmCase]:
    """Rows and weights of int8, and rows of int8 as they arrive with weights that are wider."""
    plain, gated = GemmCase(dtype="i8", scales=True), replace(_GATED, dtype="i8", scales=True)
    return {
        "gemm_int8_scales": plain,
        "gemm_int8_scales_bias": replace(plain, bias=True),
        "gemm_int8_scales_bias_gelu": replace(plain, bias=True, activation="gelu"),
        "gemm_int8_scales_bias_relu2": replace(plain, bias=True, activation="relu2"),
        "gated_silu_int8_scales": gated,
        "gated_silu_int8_scales_bias": replace(gated, bias=True),
        "gated_gelu_int8_scales_bias": replace(gated, bias=True, activation="gelu"),
        "gated_swiglu_oai_int8_scales_bias_interleaved": replace(_OAI, dtype="i8", scales=True, interleaved=True),
        "gemm_int8_by_bf16_bias": GemmCase(payload="i8", bias=True),
        "gated_silu_int8_by_bf16": replace(_GATED, payload="i8"),
        "gated_silu_int8_by_bf16_ragged_bias": replace(_GATED, payload="i8", ragged=True, bias=True),
        "gated_silu_int8_by_fp32": replace(_GATED, payload="i8", dtype="fp32"),
    }


def _too_big() -> dict[str, GemmCase]:
    big = TILE_TABLE["ascend", 2]
    return {
        "too_big_for_l0c": GemmCase(tiles=replace(big, block_m=256), overflows="L0C"),
        "too_big_for_l1": GemmCase(tiles=replace(big, block_k=1024), overflows="L1"),
        "too_big_for_ub": GemmCase(activation="relu2", tiles=big, overflows="UB"),
    }
