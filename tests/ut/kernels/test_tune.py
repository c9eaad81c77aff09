"""Tuning picks by measured time, and leaves out what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.kernel_cases import batched_case, reference, relative_error
from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.experts import triton_mlp
from vllm_ascend_moe.experts.batched_triton import TritonBatchedExperts
from vllm_ascend_moe.experts.rows_triton import TritonRowsExperts
from vllm_ascend_moe.experts.triton_mlp import MlpTiles
from vllm_ascend_moe.experts.triton_tune import fastest_mlp_tiles
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.tiles import HOPPER_16BIT, TILE_TABLE, ascend_tiles, rows_of_table
from vllm_ascend_moe.kernels.tune import fastest_tiles

BASE = TILE_TABLE["interpreter", 4]
OPERANDS = (torch.randn(2, 4, 16), torch.randn(2, 8, 16), torch.tensor([4, 1], dtype=torch.int32))


def test_the_smallest_time_wins_and_every_candidate_really_runs():
    candidates = [replace(BASE, group_m=size) for size in (1, 2, 4)]
    times = iter([3.0, 1.0, 2.0])
    out = torch.zeros(2, 4, 8)
    seen = []

    def measure(call):
        out.zero_()
        call()
        seen.append(bool(out[0].any()))
        return next(times)

    assert fastest_tiles(*OPERANDS, candidates=candidates, measure=measure, out=out) is candidates[1]
    assert seen == [True] * 3


def test_tiles_that_do_not_fit_are_left_out():
    candidates = [replace(BASE, group_m=size) for size in (1, 2)]

    def measure(call):
        if not hasattr(measure, "called"):
            measure.called = True
            raise OutOfResources(2, 1, "shared memory")
        return 1.0

    assert fastest_tiles(*OPERANDS, candidates=candidates, measure=measure) is candidates[1]
    with pytest.raises(InvalidValueError, match="candidates"):
        fastest_tiles(*OPERANDS, candidates=[])


def test_the_table_is_tried_by_default():
    tried = []
    fastest_tiles(*OPERANDS, measure=lambda call: tried.append(call) or 1.0)
    assert len(tried) == 1
    pointers = TILE_TABLE["cuda", 2]  # last, for operands that descriptors cannot hold
    assert rows_of_table("hopper", torch.bfloat16) == [*HOPPER_16BIT.values(), pointers]
    assert rows_of_table("cuda", torch.bfloat16) == [pointers]
    # On Ascend the epilogue shares the buffers with the tile.
    assert rows_of_table("ascend", torch.bfloat16, "silu", 1) == [ascend_tiles(TILE_TABLE["ascend", 2], "silu", 1)]
    assert (
        rows_of_table("ascend", torch.bfloat16)[0].block_n
        == 2 * rows_of_table("ascend", torch.bfloat16, "silu")[0].block_n
    )


def test_each_gemm_of_an_mlp_gets_its_own_fastest_tiles():
    case = batched_case([9, 0, 20], 20, 24, 40)
    wide, narrow = BASE, replace(BASE, block_n=64)
    cost = {(wide, None): 3, (narrow, None): 2, (narrow, wide): 1, (narrow, narrow): 4}
    tried = []

    def measure(call):
        call()
        tried.append(call.__defaults__[0])
        return cost[tuple(tried[-1])]

    tiles = fastest_mlp_tiles(case.hidden, case.counts, case.weights, candidates=[wide, narrow], measure=measure)
    assert tiles == (narrow, wide)
    assert [tuple(tiles) for tiles in tried] == list(cost)
    out = TritonBatchedExperts(tiles=tiles).apply_batched(case.hidden, case.counts, case.weights)
    assert relative_error(out[case.own()], reference(case)) < 2e-6
    odd = batched_case([3], 4, 17, 5)
    descriptors = [replace(BASE, tma=True)]
    with pytest.raises(InvalidValueError, match="candidates"):
        fastest_mlp_tiles(
            odd.hidden, odd.counts, odd.weights, candidates=descriptors, measure=lambda call: call() is None
        )


def test_given_tiles_reach_both_gemms_of_both_experts(monkeypatch):
    """The kernel is replaced by one that notes its tiles and calls the real one."""
    seen = []

    def noting(*operands, tiles=None, **options):
        seen.append(tiles)
        return expert_gemm(*operands, tiles=tiles, **options)

    monkeypatch.setattr(triton_mlp, "expert_gemm", noting)
    tiles = MlpTiles(w13=replace(BASE, group_m=1), w2=replace(BASE, group_m=4))
    case = batched_case([9, 0, 20], 20, 24, 40)
    TritonBatchedExperts(tiles=tiles).apply_batched(case.hidden, case.counts, case.weights)
    TritonRowsExperts(tiles).apply(torch.randn(5, 24), torch.rand(5, 2), torch.randint(0, 3, (5, 2)), case.weights)
    assert seen == [*tiles, *tiles]
