"""Quantised dispatch: tokens travel in one byte an element with one fp32 scale a token, through any strategy.

Symbols: T_r tokens of this rank; H hidden size; K top-k; rows of whatever shape a strategy delivers.

The way back is not quantised: expert outputs are summed, and a sum of rounded terms loses what routing weights mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched, TokenComm
from vllm_ascend_moe.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError
from vllm_ascend_moe.layout import TokenLayout

Payload = Literal["int8", "fp8"]

# Payload -> (what experts read, largest value of that type).
_TYPES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
# The smallest scale: an all-zero token divides by it, and a scale below it would have lost its own digits.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_tokens(hidden: torch.Tensor, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each token to its own scale, symmetric around 0.

    With s the token's scale, an element x comes back within s/2 (int8), or within max(|x| / 16, s / 1024) (fp8, e4m3:
    3 bits of mantissa, smallest step 2^-9), each plus a rounding of the type it comes back in. A token that holds NaN
    or infinity gets a scale of NaN or infinity, so that all of it comes back as NaN: a fault stays visible.

    Args:
        hidden: [n, H], floating.
        payload: "int8" or "fp8".

    Returns:
        int8, or the bytes of float8_e4m3fn as uint8 (collectives do not know fp8), [n, H]; and fp32 scales [n].
    """
    dtype, limit = _TYPES[payload]
    x = hidden.to(torch.float32)
    largest = x.abs().amax(dim=-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scales = (largest / limit).clamp(min=_SMALLEST_SCALE)
    # NaN, here of tokens with NaN or infinity, has no int8. Nothing is above the limit by more than a rounding.
    scaled = (x / scales[..., None]).nan_to_num(nan=0.0)
    if dtype == torch.int8:
        return scaled.round().to(torch.int8), scales
    return scaled.to(dtype).view(torch.uint8), scales


def dequantize_tokens(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values * scales`` in ``dtype``.

    Args:
        values: int8 or float8_e4m3fn, [..., H]; scales: fp32 [...].
    """
    return (values.to(torch.float32) * scales[..., None]).to(dtype)


class QuantizedDispatch:
    """Any strategy with a quantised payload. See :class:`~vllm_ascend_moe.comm.base.TokenComm`.

    Pad rows and other rows without a token hold whatever the strategy leaves there, as without this class.

    Args:
        inner: the strategy that moves the rows.
        payload: "int8" or "fp8" (e4m3), the same on every rank.
        dequantize: hand experts tokens of the type they were given in. False hands on int8 or float8_e4m3fn with
            ``Dispatched.scales``, for batched experts, which take scales and then never see a wide copy.

    Raises:
        InvalidValueError: an unknown payload.
        UnsupportedError: ``dequantize=False`` with a strategy of the rows format, whose experts take no scales.
    """

    def __init__(self, inner: TokenComm, payload: Payload, *, dequantize: bool = True) -> None:
        if payload not in _TYPES:
            choices = " or ".join(map(repr, get_args(Payload)))
            raise InvalidValueError("payload", payload, choices, "Choose one of them, or pass the strategy unwrapped.")
        if not dequantize and inner.format is not ActivationFormat.BATCHED:
            raise UnsupportedError(
                "dequantize=False needs a strategy of the batched format: experts of the rows format take no scales. "
                "Leave dequantize=True."
            )
        self.inner = inner
        self.payload: Payload = payload
        self.dequantize = dequantize
        self.format = inner.format

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        num_experts: int,
        layout: TokenLayout,
        scales: torch.Tensor | None = None,
    ) -> Dispatched:
        """Quantises hidden [T_r, H] and dispatches it with its scales [T_r].

        Raises:
            ShapeError: scales are given, so hidden already is quantised. DtypeError: hidden is not floating.
            And whatever the strategy raises.
        """
        if scales is not None:
            raise ShapeError("scales", tuple(scales.shape), "None", "Dispatch quantised tokens without this wrapper.")
        if not hidden.is_floating_point() or hidden.element_size() == 1:
            raise DtypeError("hidden.dtype", hidden.dtype, "a floating-point type of 2 bytes or more", "Cast hidden.")
        values, scales = quantize_tokens(hidden, self.payload)
        sent = self.inner.dispatch(
            values, topk_weights, topk_ids, num_experts=num_experts, layout=layout, scales=scales
        )
        assert sent.scales is not None, "the strategy lost the scales it was given"
        arrived = sent.hidden.view(_TYPES[self.payload][0])
        if not self.dequantize:
            return replace(sent, hidden=arrived)
        return replace(sent, hidden=dequantize_tokens(arrived, sent.scales, hidden.dtype), scales=None)

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        """As the strategy's own."""
        return self.inner.combine(expert_output, handle)
