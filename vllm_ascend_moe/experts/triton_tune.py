"""Optional tuning of the Triton experts: times tiles on operands at hand, before serving. Waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.triton_mlp import MlpTiles, expert_mlp_rows
from vllm_ascend_moe.kernels.operands import activation_form
from vllm_ascend_moe.kernels.targets import target_of
from vllm_ascend_moe.kernels.tiles import GemmTiles, TilesError, rows_of_table
from vllm_ascend_moe.kernels.tune import median_milliseconds


def fastest_mlp_tiles(
    hidden: torch.Tensor,
    counts: torch.Tensor,
    weights: ExpertWeights,
    *,
    activation: str = "silu",
    candidates: list[GemmTiles] | None = None,
    measure: Callable[[Callable[[], object]], float] = median_milliseconds,
    **arguments: Any,
) -> MlpTiles:
    """The fastest tiles of an expert MLP, for ``TritonBatchedExperts(tiles=...)`` or ``TritonRowsExperts(...)``.

    First those of the first GEMM are chosen, then those of the second beside them, each by the time of the whole MLP.

    Args:
        hidden, counts, weights, activation, arguments: as for expert_mlp_rows, with counts as serving will have them.
        candidates: the tiles to try; None: every row of the table for this device, dtype and activation.
        measure: how a call is timed, in any unit.

    Raises:
        InvalidValueError: no candidate fits the device and the operands, or see expert_mlp_rows.
    """
    target, form = target_of(hidden.device), activation_form(activation)
    chosen = MlpTiles()
    for name, weight, epilogue in (("w13", weights.w13, (form.name, form.parts)), ("w2", weights.w2, ("none", 1))):
        table = rows_of_table(target, weight.dtype, *epilogue) if candidates is None else candidates
        times: dict[MlpTiles, float] = {}
        for row in table:
            tiles = chosen._replace(**{name: row})
            try:
                times[tiles] = measure(
                    lambda tiles=tiles: expert_mlp_rows(  # type: ignore[misc]
                        hidden, counts, weights, activation=activation, tiles=tiles, **arguments
                    )
                )
            except (OutOfResources, TilesError):
                continue
        if not times:
            limit = f"tiles that {name} can have on this device"
            raise InvalidValueError("candidates", len(table), limit, "Pass smaller tiles, fewer stages, or no tma.")
        chosen = min(times, key=times.__getitem__)
    return chosen
