"""Tuning picks by measured time, and leaves out what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.kernels.tiles import HOPPER_16BIT, TILE_TABLE, rows_of_table
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
    assert rows_of_table("hopper", torch.bfloat16) == list(HOPPER_16BIT.values())
