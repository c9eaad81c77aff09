"""Experts of both formats on CPU: native kernels, or plain torch where the extension is not built.

Symbols: rows tokens; H hidden size; N expert intermediate size; K top-k; E_l experts on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.experts.activation import check_activation, is_gated
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.checks import check_batched, check_routing
from vllm_ascend_moe.experts.torch_form import TorchExperts, dequantize_rows
from vllm_ascend_moe.ops.extension import native_available

NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class PackedExpertWeights(ExpertWeights):
    """Weights whose rows were repacked in place for the native kernels; no other kernel can read them."""


def pack_weights(weights: ExpertWeights) -> ExpertWeights:
    """Repacks ``w13`` and ``w2`` in place, so that kernels read them in memory order. Call it once, after loading.

    Needs no second copy of the weights. Where the native kernels cannot use packed weights (no extension, another
    dtype, sizes not a multiple of 16), nothing changes and the same weights come back.

    Args:
        weights: w13 [E_l, 2N or N, H] and w2 [E_l, H, N], contiguous. They are overwritten.

    Returns:
        :class:`PackedExpertWeights` that share the tensors, or ``weights``.
    """
    w13, w2 = weights.w13, weights.w2
    sizes_fit = not any(size % 16 for size in (*w13.shape[1:], *w2.shape[1:]))
    plain = isinstance(weights, PackedExpertWeights) or w13.dtype != w2.dtype or w13.device.type != "cpu"
    if plain or w13.dtype not in NATIVE_DTYPES or not sizes_fit or not (w13.is_contiguous() and w2.is_contiguous()):
        return weights
    if not native_available():
        return weights
    torch.ops.ascend_moe.pack_expert_weights_(w13)
    torch.ops.ascend_moe.pack_expert_weights_(w2)
    return PackedExpertWeights(w13=w13, w2=w2, w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)


class NativeExperts:
    """:class:`~vllm_ascend_moe.experts.base.RowsExperts` and ``BatchedExperts`` on CPU.

    Runs on threads of ``torch.get_num_threads()``. The result does not depend on their number: products are summed
    over k in one order and experts in ascending order, in fp32 (with AVX512-BF16 and AMX, inner values are rounded to
    bf16 between the two products, and factors and sums below 2**-126 count as 0).

    Args:
        isa: instruction set by name ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"), "" for the best of this
            processor.

    Raises:
        InvalidValueError: an instruction set this processor does not have.
    """

    def __init__(self, isa: str = "") -> None:
        self.isa = isa
        if isa and native_available():
            known = sorted({name for dtype in NATIVE_DTYPES for name in available_isas(dtype)})
            if isa not in known:
                raise InvalidValueError("isa", isa, f"one of {known} on this processor", 'Pass "" for the best.')
        self._torch_form = TorchExperts()

    def apply(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
        *,
        expert_map: torch.Tensor | None = None,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`~vllm_ascend_moe.experts.base.RowsExperts`. Rows of every tensor may be strided.

        Raises:
            InvalidValueError: an unknown activation.
            ShapeError: shapes that do not fit together, or packed weights in another dtype than ``hidden``.
        """
        _check(hidden, weights, activation)
        check_routing(hidden, topk_weights, topk_ids)
        if not _runs_natively(hidden, weights):
            return self._torch_form.apply(
                hidden,
                topk_weights,
                topk_ids,
                weights,
                expert_map=expert_map,
                activation=activation,
                apply_router_weight_on_input=apply_router_weight_on_input,
                out=out,
            )
        target = _target(hidden, hidden.dtype, out)
        torch.ops.ascend_moe.grouped_mlp(
            target,
            _with_contiguous_rows(hidden),
            weights.w13,
            weights.w2,
            weights.w13_bias,
            weights.w2_bias,
            topk_weights.to(torch.float32),
            topk_ids,
            None if expert_map is None else expert_map.to(torch.int32).contiguous(),
            activation,
            apply_router_weight_on_input,
            isinstance(weights, PackedExpertWeights),
            self.isa,
        )
        return _finish(target, out)

    def apply_batched(
        self,
        hidden: torch.Tensor,
        expert_num_tokens: torch.Tensor,
        weights: ExpertWeights,
        *,
        activation: str = "silu",
        scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`~vllm_ascend_moe.experts.base.BatchedExperts`. Rows past the count keep what ``out`` held.

        Raises:
            InvalidValueError: an unknown activation, or counts below 0 or above the rows (from the native kernel a
            ValueError).
            ShapeError: shapes that do not fit together.
        """
        check_batched(hidden, expert_num_tokens, scales, weights.w13.shape[0])
        if scales is not None:
            hidden = dequantize_rows(hidden, expert_num_tokens, scales, weights.w13.dtype)
        _check(hidden, weights, activation)
        if not _runs_natively(hidden, weights):
            return self._torch_form.apply_batched(hidden, expert_num_tokens, weights, activation=activation, out=out)
        in_place = out is not None and out.is_contiguous() and out.dtype == hidden.dtype
        target = out if in_place else torch.empty(hidden.shape, dtype=hidden.dtype)
        assert target is not None
        if out is not None and not in_place:
            target.copy_(out)
        torch.ops.ascend_moe.batched_mlp(
            target,
            hidden.contiguous(),
            expert_num_tokens,
            weights.w13,
            weights.w2,
            weights.w13_bias,
            weights.w2_bias,
            activation,
            isinstance(weights, PackedExpertWeights),
            self.isa,
        )
        return _finish(target, out)


def available_isas(dtype: torch.dtype) -> list[str]:
    """Instruction sets the native kernels have for weights of ``dtype`` on this processor, best first."""
    return torch.ops.ascend_moe.cpu_isas(dtype) if native_available() else []


def _runs_natively(hidden: torch.Tensor, weights: ExpertWeights) -> bool:
    same = hidden.dtype == weights.w13.dtype == weights.w2.dtype and hidden.dtype in NATIVE_DTYPES
    fits = same and hidden.device.type == "cpu" and weights.w13.is_contiguous() and weights.w2.is_contiguous()
    if not fits and isinstance(weights, PackedExpertWeights):
        raise ShapeError(
            "hidden.dtype",
            hidden.dtype,
            f"{weights.w13.dtype} on CPU, as the packed weights",
            "Cast hidden, or keep the weights unpacked.",
        )
    return fits and native_available()


def _check(hidden: torch.Tensor, weights: ExpertWeights, activation: str) -> None:
    check_activation(activation)
    num_experts, hidden_size, inner = weights.w2.shape
    rows = 2 * inner if is_gated(activation) else inner
    for name, got, want in (
        ("hidden.shape[-1]", hidden.shape[-1], hidden_size),
        ("w13.shape", tuple(weights.w13.shape), (num_experts, rows, hidden_size)),
    ):
        if got != want:
            raise ShapeError(
                name, got, f"{want} with w2 {tuple(weights.w2.shape)} and {activation}", "Pass matching weights."
            )


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _target(hidden: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    if out is not None and out.dtype == dtype and out.stride(-1) == 1:
        return out
    return torch.empty(hidden.shape, dtype=dtype)


def _finish(target: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return target if out is None or out is target else out.copy_(target)
