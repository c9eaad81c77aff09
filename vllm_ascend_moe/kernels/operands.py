"""The operands of the expert GEMM: what is accepted, and their strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.kernels.targets import summary

_POINTWISE = ("silu", "gelu", "gelu_tanh", "relu2")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, *FP8)


@dataclass(frozen=True)
class ActivationForm:
    """How the kernel computes an activation: the slices of w it needs, its name there, whether slices interleave."""

    parts: int
    name: str
    interleaved: bool = False


ACTIVATION_FORMS: dict[str, ActivationForm] = {
    "none": ActivationForm(1, "none"),
    **{name: ActivationForm(2, name) for name in _POINTWISE},
    **{f"{name}_no_mul": ActivationForm(1, name) for name in _POINTWISE},
    "swigluoai": ActivationForm(2, "swiglu_oai", interleaved=True),
    "swigluoai_uninterleave": ActivationForm(2, "swiglu_oai"),
}


def activation_form(activation: str) -> ActivationForm:
    """Raises InvalidValueError for a name that is not in ACTIVATION_FORMS."""
    form = ACTIVATION_FORMS.get(activation)
    if form is None:
        names = ", ".join(ACTIVATION_FORMS)
        raise InvalidValueError("activation", activation, f"one of {names}", "Use another kernel for this model.")
    return form


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Sizes and strides of one call, in elements. a: rows, b: weights, c: results, v: vectors along N (bias, scale);
    e: from expert to expert, m: from row to row, n: from column to column, p: from the gate part to the up part."""

    experts: int
    capacity: int
    parts: int
    n: int
    k: int
    a_pitch: int  # stride_ae in rows; -1 where it is no whole number of rows
    c_pitch: int  # stride_ce likewise
    stride_ae: int
    stride_am: int
    stride_be: int
    stride_bp: int
    stride_bn: int
    stride_ce: int
    stride_cm: int
    stride_vp: int
    step: int  # from column to column of a vector

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute whatever the counts."""
        return not (self.experts and self.capacity and self.n)

    @staticmethod
    def of(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, form: ActivationForm, *, batched: bool) -> Operands:
        """From checked inputs; checks ``out``."""
        n = w.shape[1] // form.parts
        _check_out(a, out, n)
        row, step = w.stride(1), 2 if form.interleaved else 1
        stride_ae = a.stride(0) if batched else 0
        stride_am = a.stride(-2)
        stride_ce = out.stride(0) if batched else 0
        stride_cm = out.stride(-2)
        return Operands(
            experts=w.shape[0],
            capacity=a.shape[-2],
            parts=form.parts,
            n=n,
            k=w.shape[2],
            a_pitch=_pitch(stride_ae, stride_am),
            c_pitch=_pitch(stride_ce, stride_cm),
            stride_ae=stride_ae,
            stride_am=stride_am,
            stride_be=w.stride(0),
            stride_bp=row if form.interleaved else n * row,
            stride_bn=step * row,
            stride_ce=stride_ce,
            stride_cm=stride_cm,
            stride_vp=1 if form.interleaved else n,
            step=step,
        )


def _pitch(stride: int, row: int) -> int:
    return stride // row if row and stride % row == 0 else -1


def check_operands(
    a: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: ActivationForm,
) -> None:
    """Raises ShapeError for inputs that do not fit each other; see expert_gemm for what fits."""
    experts = _check_weights(w, form)
    _check_rows(a, w, experts, batched=starts is None)
    check_counts(counts, starts, experts)
    _check_vector("a_scale", a_scale, a.shape[:-1])
    _check_vector("w_scale", w_scale, w.shape[:2])
    _check_vector("bias", bias, w.shape[:2])
    for tensor in (w, counts, starts, a_scale, w_scale, bias):
        if tensor is not None and tensor.device != a.device:
            raise ShapeError("device", str(tensor.device), f"{a.device}, where a is", "Move the tensor there.")


def check_counts(counts: torch.Tensor, starts: torch.Tensor | None, experts: int) -> None:
    """Raises ShapeError unless both are int32 [experts] without gaps. Devices are not compared."""
    for name, vector in (("counts", counts), ("starts", starts)):
        if vector is None:
            continue
        if vector.dtype != torch.int32 or vector.shape != (experts,):
            raise ShapeError(name, summary(vector), f"int32 [{experts}]", "Pass one number per local expert.")
        if experts > 1 and vector.stride(0) != 1:
            raise ShapeError(f"{name}.stride(0)", vector.stride(0), "1", "Call .contiguous().")


def _check_vector(name: str, vector: torch.Tensor | None, shape: torch.Size) -> None:
    if vector is None:
        return
    if vector.shape != shape or not vector.dtype.is_floating_point:
        raise ShapeError(name, summary(vector), f"floating {list(shape)}", "Reshape or convert it.")
    rows_apart = vector.dim() < 2 or vector.stride(0) == shape[1] or name == "a_scale"
    if not rows_apart or (vector.stride(-1) != 1 and shape[-1] > 1):
        raise ShapeError(name, summary(vector), "contiguous", "Call .contiguous() once, at load time.")


def _check_weights(w: torch.Tensor, form: ActivationForm) -> int:
    if w.dim() != 3 or w.dtype not in _DTYPES:
        raise ShapeError("w", summary(w), f"[E_l, N, K] of {_names(_DTYPES)}", "Pass this rank's expert weights.")
    if w.shape[1] % form.parts:
        raise ShapeError("w.shape[1]", w.shape[1], "even for a gated activation", "Pass gate and up rows.")
    if w.stride(2) != 1 and w.shape[2] > 1:
        raise ShapeError("w.stride(2)", w.stride(2), "1", "Call .contiguous() once, at load time.")
    return w.shape[0]


def _check_rows(a: torch.Tensor, w: torch.Tensor, experts: int, *, batched: bool) -> None:
    wanted = f"[{experts}, rows, {w.shape[2]}]" if batched else f"[total, {w.shape[2]}] with starts"
    fits = a.dim() == (3 if batched else 2) and a.shape[-1] == w.shape[2] and (not batched or a.shape[0] == experts)
    if not fits:
        raise ShapeError("a", summary(a), wanted, "Pass rows of the weights' K.")
    if a.stride(-1) != 1 and a.shape[-1] > 1:
        raise ShapeError("a.stride(-1)", a.stride(-1), "1", "Call .contiguous().")
    if a.dtype not in _DTYPES or not (a.dtype == w.dtype or (a.dtype.itemsize == 1 and w.dtype.itemsize > 1)):
        accepted = f"{w.dtype}, or an 8-bit payload for 16- or 32-bit weights"
        raise ShapeError("a.dtype", a.dtype, accepted, "Convert one of them.")


def _check_out(a: torch.Tensor, out: torch.Tensor, n: int) -> None:
    shape = (*a.shape[:-1], n)
    if out.shape != shape or not out.dtype.is_floating_point or out.dtype.itemsize == 1:
        raise ShapeError("out", summary(out), f"bf16, fp16 or fp32 {list(shape)}", "Pass a tensor of that shape.")
    if out.stride(-1) != 1 and n > 1:
        raise ShapeError("out.stride(-1)", out.stride(-1), "1", "Pass a tensor whose rows are contiguous.")
    if out.device != a.device:
        raise ShapeError("out.device", str(out.device), str(a.device), "Move it there.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
