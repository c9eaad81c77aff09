"""Writing and reading paged caches of keys and values, ``atb::``.

A cache is [blocks, block_size, heads, D]; a slot is a row of it with the first two dimensions taken together.
"""

from __future__ import annotations

import torch

from vllm_ascend_moe.softnpu.overrides.emulate import emulate


def _reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Writes each token's key and value, [T, heads, D], to its slot, int32 [T]; a negative slot writes nothing."""
    _write("atb::_npu_reshape_and_cache", key, key_cache, slot_indices)
    _write("atb::_npu_reshape_and_cache", value, value_cache, slot_indices)


def _reshape_and_cache_siso(key: torch.Tensor, key_cache: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """The same for one cache."""
    _write("atb::_npu_reshape_and_cache_siso", key, key_cache, slot_indices)


def _write(name: str, rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    if slots.dtype != torch.int32 or slots.shape != rows.shape[:1]:
        raise ValueError(f"{name}: slot_indices is {slots.dtype} {tuple(slots.shape)}; wanted int32 ({rows.shape[0]},)")
    if rows.dtype != cache.dtype or rows.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"{name}: tokens are {rows.dtype} {tuple(rows.shape)}, the cache is {cache.dtype} {tuple(cache.shape)}; "
            "wanted the same type, and [T, heads, D] and [blocks, block_size, heads, D]"
        )
    _check_range(name, "slot_indices", slots, cache.shape[0] * cache.shape[1])
    written = slots >= 0
    cache.view(-1, *cache.shape[2:])[slots[written].long()] = rows[written]


def _paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies ``context_lens[b]`` tokens of each sequence, from its token ``seq_starts[b]`` on, to key and value.

    With ``cumsum``, ``context_lens`` is [sequences + 1], running sums that start with 0.
    """
    name = "atb::npu_paged_cache_load"
    lengths = context_lens.diff().tolist() if cumsum else context_lens.tolist()
    starts = [0] * len(lengths) if seq_starts is None else seq_starts.tolist()
    block_size = key_cache.shape[1]
    if any(start % block_size for start in starts):
        raise ValueError(f"{name}: seq_starts {starts} must be multiples of the block size, {block_size}")
    if not len(lengths) == len(starts) == len(block_table):
        raise ValueError(
            f"{name}: {len(lengths)} lengths, {len(starts)} starts, {len(block_table)} rows of block_table"
        )
    rows = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    total = sum(lengths)
    if total != key.shape[0] or total != value.shape[0]:
        raise ValueError(f"{name}: context_lens come to {total} tokens; key has {key.shape[0]}, value {value.shape[0]}")
    slots = torch.cat(
        [
            table.long()[at // block_size] * block_size + at % block_size
            for table, at in zip(block_table, rows, strict=True)
        ]
    )
    _check_range(name, "block_table", slots // block_size, key_cache.shape[0])
    for cache, out in ((key_cache, key), (value_cache, value)):
        out.copy_(cache.reshape(-1, *cache.shape[2:])[slots])
    return key, value


def _check_range(name: str, argument: str, values: torch.Tensor, limit: int) -> None:
    if values.numel() and int(values.max()) >= limit:
        raise ValueError(f"{name}: {argument} has {int(values.max())}; the cache ends at {limit - 1}")


def install() -> None:
    """Registers the kernels."""
    emulate("atb::_npu_reshape_and_cache", _reshape_and_cache)
    emulate("atb::_npu_reshape_and_cache_siso", _reshape_and_cache_siso)
    emulate("atb::npu_paged_cache_load.out", _paged_cache_load)
