"""Further operators of vllm-ascend's own library."""

from __future__ import annotations

import torch

from vllm_ascend_moe.softnpu.overrides.emulate import emulate_undefined

_MASKED = "_C_ascend::get_masked_input_and_mask"
_PRODUCT = "_C_ascend::batch_matmul_transpose"


def _masked_input(
    input: torch.Tensor, org_start: int, org_end: int, org_padding: int, added_start: int, added_end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of this rank's part of the vocabulary, as rows of its embedding; the others are 0 and masked.

    The embedding has the original ids [org_start, org_end), padding, and then the added ids.
    """
    original = (input >= org_start) & (input < org_end)
    added = (input >= added_start) & (input < added_end)
    row = torch.where(original, input - org_start, input - added_start + (org_end - org_start) + org_padding)
    here = original | added
    return torch.where(here, row, 0).to(input.dtype), ~here


def _batch_matmul_transpose(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, format_mode: str | None = None, quant_mode: str | None = None
) -> None:
    """c [T, M, N] = a [T, M, K] times b [M, K, N], M products side by side."""
    if format_mode not in (None, "ND") or quant_mode is not None:
        raise NotImplementedError(
            f"{_PRODUCT}: format_mode = {format_mode}, quant_mode = {quant_mode} is not emulated, only ND and None; "
            "add it to vllm_ascend_moe/softnpu/overrides/custom.py"
        )
    if a.dim() != 3 or b.shape[:2] != a.shape[1:] or c.numel() != a.shape[0] * b.shape[0] * b.shape[2]:
        raise ValueError(f"{_PRODUCT}: a {tuple(a.shape)}, b {tuple(b.shape)} and c {tuple(c.shape)} do not fit")
    c.copy_(torch.bmm(a.transpose(0, 1), b).transpose(0, 1).reshape(c.shape))


def install() -> None:
    """Registers the kernels."""
    emulate_undefined(
        _MASKED,
        "(Tensor input, int org_start, int org_end, int org_padding, int added_start, int added_end) "
        "-> (Tensor masked_input, Tensor mask)",
        _masked_input,
    )
    emulate_undefined(
        _PRODUCT,
        "(Tensor a, Tensor b, Tensor(a!) c, str? format_mode=None, str? quant_mode=None) -> ()",
        _batch_matmul_transpose,
    )
