"""Optional tuning: times tiles on operands at hand. Waits for the device, so that nothing here runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.operands import activation_form
from vllm_ascend_moe.kernels.targets import target_of
from vllm_ascend_moe.kernels.tiles import GemmTiles, TilesError, rows_of_table


def median_milliseconds(call: Callable[[], object]) -> float:
    """The median time of a call on the current device."""
    from triton.testing import do_bench

    return do_bench(call, return_mode="median")


def fastest_tiles(
    a: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    *,
    candidates: Iterable[GemmTiles] | None = None,
    measure: Callable[[Callable[[], object]], float] = median_milliseconds,
    **arguments: Any,
) -> GemmTiles:
    """The fastest tiles for one GEMM, to pass as ``expert_gemm(..., tiles=...)`` from then on.

    Args:
        a, w, counts, arguments: as for expert_gemm; rows of every expert are computed, and ``out`` is overwritten.
        candidates: the tiles to try; None: every row of the table for this device and dtype.
        measure: how a call is timed.

    Returns:
        The tiles with the smallest time. Those that do not fit the device or the operands are left out.

    Raises:
        InvalidValueError: no candidate fits, or see expert_gemm.
    """
    form = activation_form(arguments.get("activation", "none"))
    table = rows_of_table(target_of(a.device), w.dtype, form.name, form.parts) if candidates is None else candidates
    tried = list(table)
    times: dict[GemmTiles, float] = {}
    for tiles in tried:
        try:
            times[tiles] = measure(lambda tiles=tiles: expert_gemm(a, w, counts, tiles=tiles, **arguments))  # type: ignore[misc]
        except (OutOfResources, TilesError):
            continue
    if not times:
        limit = "tiles that fit the device and the operands"
        raise InvalidValueError("candidates", len(tried), limit, "Pass smaller tiles, fewer stages, or no tma.")
    return min(times, key=times.__getitem__)
