# Device code: arguments are Triton values, whose types come from the call.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"
"""Expert activations inside kernels, in fp32; the names are those of ``experts/activation.py``."""

from __future__ import annotations

import triton
import triton.language as tl

# gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), both clamped.
_ALPHA = tl.constexpr(1.702)
_LIMIT = tl.constexpr(7.0)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def pointwise(x, NAME: tl.constexpr):
    """silu, gelu, gelu_tanh or relu2 of an fp32 tensor."""
    if NAME == "silu":
        y = x * tl.sigmoid(x)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh":
        # tanh(z) = 2 sigmoid(2z) - 1, since not every target has a tanh.
        y = x * tl.sigmoid((x + 0.044715 * x * x * x) * (2.0 * _SQRT_2_OVER_PI))
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        y = tl.maximum(x, 0.0)
        y = y * y
    return y


@triton.jit
def gated(gate, up, NAME: tl.constexpr):
    """A gated activation of two fp32 tensors; "swiglu_oai" is what both swigluoai layouts come down to."""
    if NAME == "swiglu_oai":
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        y = gate * tl.sigmoid(gate * _ALPHA) * (up + 1.0)
    else:
        y = pointwise(gate, NAME) * up
    return y
