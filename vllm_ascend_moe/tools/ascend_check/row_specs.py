"""The kernels that copy, sort, sum and quantise rows, as their launches pass them for Ascend A2. Needs no torch."""

from __future__ import annotations

from typing import Any

from vllm_ascend_moe.kernels import rows, slot_kernels
from vllm_ascend_moe.kernels.tiles import ROW_TILES, row_tiles_for, slot_block, sort_block
from vllm_ascend_moe.tools.ascend_check.spec import KernelSpec

_ROWS = ROW_TILES["ascend"]
_POINTWISE = ("silu", "gelu", "gelu_tanh", "relu2")


def row_specs() -> list[KernelSpec]:
    """All of them."""
    return [*_activations(), *_sums(), *_copies(), *_sorts(), *_slots()]


def _activation(
    name: str, activation: str = "none", parts: int = 1, *, x: str = "bf16", step: int = 1, ragged: bool = False
) -> KernelSpec:
    """One form of activate_kernel, with scales where the name ends with int8."""
    tiles, integer = row_tiles_for("ascend", activation), name.endswith("int8")
    types = {"x": f"*{x}", "out": "*i8" if integer else f"*{x}", "scale": "*fp32"}
    types |= {"counts_ptr": "*i32", "starts": "*i32", "limit": "fp32"}
    constants = {"STEP": step, "PARTS": parts, "ACTIVATION": activation, "INTEGER": integer, "ROWS": tiles.rows}
    constants |= {"COLUMNS": tiles.columns, "E_BLOCK": 16, "SCAN": tiles.scan}
    absent = dict.fromkeys([*([] if integer else ["scale"]), *([] if ragged else ["starts"])])
    return KernelSpec(name, rows.activate_kernel, types, constants | absent, f"{tiles.rows}x{tiles.columns}")


def _activations() -> list[KernelSpec]:
    specs = [
        _activation("swiglu", "silu", 2),
        _activation("swiglu_int8", "silu", 2),
        _activation("swiglu_fp32_int8", "silu", 2, x="fp32"),
        _activation("quantise_ragged_int8", ragged=True),
        _activation("quantise_fp32_ragged_int8", x="fp32", ragged=True),
        _activation("quantise_fp16_int8", x="fp16"),
    ]
    for kind in _POINTWISE:
        specs.append(_activation(f"{kind}_int8", kind))
        if kind != "silu":  # swiglu above
            specs.append(_activation(f"gated_{kind}_int8", kind, 2))
    for name, step in (("swiglu_oai", 1), ("swiglu_oai_interleaved", 2)):
        specs += [_activation(f"{name}{end}", "swiglu_oai", 2, step=step) for end in ("", "_int8")]
        specs.append(_activation(f"{name}_fp32_int8", "swiglu_oai", 2, step=step, x="fp32"))
    return specs


def _sums() -> list[KernelSpec]:
    sizes: dict[str, Any] = {"TOPK": 8, "COLUMNS": _ROWS.columns}
    types, alone = {"y": "*bf16", "slots": "*i32", "weights": "*fp32", "out": "*bf16"}, {"weights": None}
    forms = {
        "combine": (types, sizes),
        "combine_fp32": (types | {"y": "*fp32", "out": "*fp32"}, sizes),
        "sum_rows": (types, sizes | alone),
        "sum_rows_fp16": (types | {"y": "*fp16", "out": "*fp16"}, sizes | alone),
    }
    return [KernelSpec(name, rows.combine_kernel, *form, f"{_ROWS.columns}") for name, form in forms.items()]


def _copies() -> list[KernelSpec]:
    sizes: dict[str, Any] = {"TOPK": 8, "COLUMNS": _ROWS.columns}
    types = {"x": "*bf16", "out": "*bf16", "scale": "*fp32", "out_scale": "*fp32", "positions": "*i32"}
    forms = {
        "scatter_rows": (types, sizes | {"scale": None, "out_scale": None}),
        "scatter_rows_int8": (types | {"x": "*i8", "out": "*i8"}, sizes),
    }
    return [KernelSpec(name, rows.scatter_rows_kernel, *form, f"{_ROWS.columns}") for name, form in forms.items()]


def _sorts() -> list[KernelSpec]:
    types = {"ids": "*i64", "expert_map": "*i32", "block_counts": "*i32", "positions": "*i32"}
    types |= {"counts": "*i32", "starts": "*i32"}
    specs = []
    for experts in (16, 256, 512, 1024):
        sizes: dict[str, Any] = sort_block(experts, "ascend")
        area = f"{sizes['BLOCK']}x{sizes['E_BLOCK']}"
        specs.append(KernelSpec(f"count_{experts}", rows.count_kernel, types, sizes, area))
        specs.append(KernelSpec(f"position_{experts}", rows.position_kernel, types, sizes, area))
    for experts in (16, 128):  # of all sizes 128 leaves the least room
        sizes = sort_block(experts, "ascend") | {"block_counts": None, "expert_map": None}
        area = f"{sizes['BLOCK']}x{sizes['E_BLOCK']}"
        specs.append(KernelSpec(f"position_one_block_{experts}", rows.position_kernel, types, sizes, area))
    return specs


def _slots() -> list[KernelSpec]:
    types = {"ids": "*i32", "expert_map": "*i32", "block_counts": "*i32", "slots": "*i32", "counts": "*i32"}
    specs = []
    for experts, ids in ((16, "*i32"), (1024, "*i64")):
        sizes: dict[str, Any] = {"TOPK": 8, **slot_block(4096, experts)}
        area, given = f"{sizes['ROWS']}x{sizes['E_BLOCK']}", types | {"ids": ids}
        specs.append(KernelSpec(f"slot_count_{experts}", slot_kernels.slot_count_kernel, given, sizes, area))
        specs.append(KernelSpec(f"slot_{experts}", slot_kernels.slot_kernel, given, sizes, area))
    alone = {"TOPK": 8, **slot_block(16, 512), "block_counts": None}
    specs.append(KernelSpec("slot_one_block", slot_kernels.slot_kernel, types, alone, "16x512"))
    return specs
