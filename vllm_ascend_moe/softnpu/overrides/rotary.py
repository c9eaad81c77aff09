"""Rotary position embedding of the ``atb::`` namespace."""

from __future__ import annotations

import torch

from vllm_ascend_moe.softnpu.overrides.emulate import emulate


def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotates ``query`` and ``key``, [T, heads * head_size], in place.

    The cache, [positions, head_size], has the cosines of a head's pairs and then the sines. A pair is (i, i + half) of
    a head in neox style, and (2 i, 2 i + 1) otherwise.
    """
    if cos_sin_cache.shape[-1] != head_size:
        raise ValueError(
            f"atb::_npu_rotary_embedding: cos_sin_cache has {cos_sin_cache.shape[-1]} columns and head_size is "
            f"{head_size}; the operator rotates whole heads: give it the rotated part of each head alone"
        )
    rows = cos_sin_cache[positions.flatten()].float()  # raises on a position outside the cache
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, half]
    for tensor in (query, key):
        first, second = _pairs(tensor.view(rows.shape[0], tensor.shape[-1] // head_size, head_size), is_neox_style)
        x, y = first.float(), second.float()
        rotated = x * cos - y * sin, y * cos + x * sin  # both, before either is written
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def _pairs(heads: torch.Tensor, is_neox_style: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second of each pair."""
    if is_neox_style:
        half = heads.shape[-1] // 2
        return heads[..., :half], heads[..., half:]
    return heads[..., ::2], heads[..., 1::2]


def install() -> None:
    """Registers the kernels."""
    emulate("atb::_npu_rotary_embedding", _rotary_embedding)
