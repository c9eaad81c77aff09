"""combine of the strategies that bring every token to every rank refuses other rows before it communicates."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_moe.comm.all_gather import AllGather
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.comm.uneven_all_gather import UnevenAllGather
from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.layout import TokenLayout


class Silent:
    """A group of two in which nothing may be sent."""

    world_size, rank_in_group = 2, 0

    def all_to_all(self, *args: object) -> torch.Tensor:
        raise AssertionError("communicated")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize(("strategy", "rows"), [(PaddedAllGather, 10), (UnevenAllGather, 8)], ids=["padded", "uneven"])
def test_other_rows_than_were_gathered(strategy: type[AllGather], rows: int, more: int, exact: bool) -> None:
    comm = strategy(Silent(), exact=exact)
    handle = strategy.handle(TokenLayout.of((3, 5), 0))
    with pytest.raises(ShapeError, match=f"= {rows + more}, but it must be"):
        comm.combine(torch.zeros(rows + more, 4), handle)
