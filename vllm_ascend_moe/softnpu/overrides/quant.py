"""vllm-ascend's own operators of quantised experts: dequantise, SwiGLU, quantise, after a matrix product or with it.

Symbols: M rows, K inner, N columns of the first product (N / 2 of its SwiGLU), E experts of this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ascend_moe.softnpu.overrides.emulate import emulate_undefined

_DEQUANT = "_C_ascend::npu_dequant_swiglu_quant"
_DEQUANT_SCHEMA = (
    "(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, "
    "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=True, "
    "int quant_mode=0, int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, float glu_bias=0.0) "
    "-> (Tensor y, Tensor scale)"
)
_PRODUCT = "_C_ascend::grouped_matmul_swiglu_quant"
_PRODUCT_SCHEMA = (
    "(Tensor x, Tensor{many} weight, Tensor{many} weight_scale, Tensor x_scale, Tensor group_list, *, "
    "Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0) "
    "-> (Tensor output, Tensor output_scale, Tensor output_offset)"
)

Two = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _refuse(name: str, values: dict[str, tuple[Any, Any]]) -> None:
    """Raises where an argument is not what alone is emulated. ``values``: (given, emulated) by argument."""
    for argument, (given, emulated) in values.items():
        if given is not emulated and (isinstance(given, torch.Tensor) or given != emulated):
            shown = "(not None)" if isinstance(given, torch.Tensor) else given
            raise NotImplementedError(
                f"{name}: {argument} = {shown} is not emulated, only {emulated}; add it to "
                "vllm_ascend_moe/softnpu/overrides/quant.py"
            )


def quantize_rows(rows: torch.Tensor) -> Two:
    """int8 [..., N] and one float scale a row, max / 127; a row of zeros gives zeros and scale 0."""
    scale = rows.abs().amax(-1, keepdim=True) / 127 if rows.numel() else rows.new_zeros(*rows.shape[:-1], 1)
    values = torch.round(rows / scale).nan_to_num(0).clamp(-128, 127)
    return values.to(torch.int8), scale.squeeze(-1)


def _by_row(name: str, argument: str, scale: torch.Tensor, counts: torch.Tensor | None, width: int) -> torch.Tensor:
    """[width] or [1, width] as it is; [E, width] row by row of the groups."""
    scale = scale.float().view(-1, scale.shape[-1])
    if scale.shape == (1, width):
        return scale
    if counts is None or scale.shape != (len(counts), width):
        groups = "none" if counts is None else len(counts)
        raise ValueError(f"{name}: {argument} {tuple(scale.shape)}; wanted [1 or groups, {width}], groups: {groups}")
    return scale.repeat_interleave(counts, 0)


def _dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> Two:
    """x, int32 or floating [M, N], times its scales; SwiGLU; int8 with a scale a row.

    With group_index, [E] of row counts, weight_scale [E, N] and quant_scale [E, N / 2] may have a row a group; rows of
    no group are not written. swiglu_mode 1: both parts are clamped, then act * sigmoid(alpha * act) * (gate + bias).
    """
    _refuse(_DEQUANT, {"quant_mode": (quant_mode, 1), "bias": (bias, None), "quant_offset": (quant_offset, None)})
    if swiglu_mode not in (0, 1) or clamp_limit < 0:
        raise ValueError(f"{_DEQUANT}: swiglu_mode = {swiglu_mode}, clamp_limit = {clamp_limit}")
    if (x.dtype == torch.int32) != (weight_scale is not None) or (
        activation_scale is not None and weight_scale is None
    ):
        raise ValueError(f"{_DEQUANT}: x is {x.dtype}; int32 needs weight_scale, and another type has no scales")
    y = torch.full((*x.shape[:-1], x.shape[-1] // 2), -86, dtype=torch.int8)  # 0xAA: not written
    scale = torch.full(x.shape[:-1], float("nan"))
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    used = len(rows) if group_index is None else int(group_index.sum())
    if used > len(rows):
        raise ValueError(f"{_DEQUANT}: group_index adds up to {used}, x has {len(rows)} rows")
    wide = rows[:used].float()
    if weight_scale is not None:
        wide = wide * _by_row(_DEQUANT, "weight_scale", weight_scale, group_index, width)
    if activation_scale is not None:
        wide = wide * activation_scale.float().reshape(-1, 1)[:used]
    left, right = wide.chunk(2, -1)
    act, gate = (left, right) if activate_left else (right, left)
    if swiglu_mode == 1:
        if clamp_limit > 0:
            act, gate = act.clamp(max=clamp_limit), gate.clamp(-clamp_limit, clamp_limit)
        wide = act * torch.sigmoid(glu_alpha * act) * (gate + glu_bias)
    else:
        wide = torch.nn.functional.silu(act) * gate
    if quant_scale is not None:
        wide = wide * _by_row(_DEQUANT, "quant_scale", quant_scale, group_index, width // 2)
    y.view(-1, width // 2)[:used], scale.view(-1)[:used] = quantize_rows(wide)
    return y, scale


def _product(
    name: str, x: torch.Tensor, weights: list[torch.Tensor], scales: list[torch.Tensor], *rest: torch.Tensor
) -> Two:
    """int8 rows of each group with its int8 weight [K, N], exactly; scaled; SwiGLU; int8 with a scale a row.

    rest: x_scale [M], and group_list [E], where each group ends. Rows of no group are not written.
    """
    x_scale, group_list = rest
    ends = group_list.tolist()
    if x.dtype != torch.int8 or any(w.dtype != torch.int8 for w in weights):
        raise NotImplementedError(
            f"{name}: x is {x.dtype}, weight is {weights[0].dtype}; only int8 is emulated; add it to "
            "vllm_ascend_moe/softnpu/overrides/quant.py"
        )
    fits = len(ends) == len(weights) == len(scales) and ends == sorted(ends) and (not ends or ends[-1] <= len(x))
    if not fits or any(w.shape[0] != x.shape[1] for w in weights):
        raise ValueError(
            f"{name}: group_list {ends} for x {tuple(x.shape)}, {len(weights)} weights {tuple(weights[0].shape)} and "
            f"{len(scales)} scales"
        )
    y = torch.full((len(x), weights[0].shape[1] // 2), -86, dtype=torch.int8)  # 0xAA: not written
    y_scale, start = torch.full((len(x),), float("nan")), 0
    for weight, scale, end in zip(weights, scales, ends, strict=True):
        part = slice(start, end)
        wide = (x[part].double() @ weight.double()).float() * scale.float().flatten() * x_scale[part].float()[:, None]
        act, gate = wide.chunk(2, -1)
        y[part], y_scale[part] = quantize_rows(torch.nn.functional.silu(act) * gate)
        start = end
    return y, y_scale


def _grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> Three:
    """With weight [E, K, N] and weight_scale [E, N]."""
    _refuse(_PRODUCT, {"bias": (bias, None), "offset": (offset, None), "swiglu_limit": (swiglu_limit, 0.0)})
    y, scale = _product(_PRODUCT, x, list(weight), list(weight_scale), x_scale, group_list)
    return y, scale, torch.full((), float("nan"))


def _of_a_list(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_scale: list[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> Three:
    """With a weight [K, N] and a scale [N] for each expert."""
    name = f"{_PRODUCT}_weight_nz_tensor_list"
    _refuse(name, {"bias": (bias, None), "offset": (offset, None), "swiglu_limit": (swiglu_limit, 0.0)})
    y, scale = _product(name, x, weight, weight_scale, x_scale, group_list)
    return y, scale, torch.full((len(x),), float("nan"))


def install() -> None:
    """Registers the kernels."""
    emulate_undefined(_DEQUANT, _DEQUANT_SCHEMA, _dequant_swiglu_quant)
    single = _PRODUCT_SCHEMA.format(many="")
    for suffix in ("", "_weight_nz"):
        emulate_undefined(f"{_PRODUCT}{suffix}", single, _grouped_matmul_swiglu_quant)
    emulate_undefined(f"{_PRODUCT}_weight_nz_tensor_list", _PRODUCT_SCHEMA.format(many="[]"), _of_a_list)
