"""Expert activations in plain torch, by the names vLLM's MoEActivation uses. Computed in the input's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_ascend_moe.errors import InvalidValueError

_SWIGLUOAI_ALPHA = 1.702  # gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), both clamped
_SWIGLUOAI_LIMIT = 7.0


def _swigluoai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=_SWIGLUOAI_LIMIT)
    up = up.clamp(min=-_SWIGLUOAI_LIMIT, max=_SWIGLUOAI_LIMIT)
    return gate * torch.sigmoid(_SWIGLUOAI_ALPHA * gate) * (up + 1.0)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_POINTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}
ACTIVATIONS = (*_POINTWISE, *(f"{name}_no_mul" for name in _POINTWISE), "swigluoai", "swigluoai_uninterleave")


def is_gated(activation: str) -> bool:
    """Whether the activation multiplies a gate half with an up half (w13 has 2N rows)."""
    return not activation.endswith("_no_mul")


def check_activation(activation: str) -> None:
    """Raises InvalidValueError unless the name is one of ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise InvalidValueError(
            "activation", activation, f"one of {', '.join(ACTIVATIONS)}", "Use another kernel for this model."
        )


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Applies one activation.

    Args:
        x: [..., 2N] for gated activations, [..., N] for ``*_no_mul``.
        activation: one of ACTIVATIONS.

    Returns:
        [..., N], same dtype.

    Raises:
        InvalidValueError: an unknown name.
    """
    check_activation(activation)
    if not is_gated(activation):
        return _POINTWISE[activation.removesuffix("_no_mul")](x)
    if activation == "swigluoai":
        return _swigluoai(x[..., ::2], x[..., 1::2])
    gate, up = x.chunk(2, dim=-1)
    if activation == "swigluoai_uninterleave":
        return _swigluoai(gate, up)
    return _POINTWISE[activation](gate) * up
