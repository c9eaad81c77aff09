"""What the fused strategy refuses when it is made and before its operators run; that it computes the right thing is
tested on NPUs (tests/e2e/npu/test_mc2.py)."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_moe.comm.mc2 import MC2
from vllm_ascend_moe.errors import (
    AscendMoEError,
    CapacityError,
    ConfigError,
    DtypeError,
    InvalidValueError,
    PlacementError,
    ShapeError,
    UnsupportedError,
)
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement

SIZES = {"max_tokens": 8, "hidden_size": 64, "top_k": 2}


class Ranks:
    def __init__(self, world_size: int = 2) -> None:
        self.world_size, self.rank_in_group = world_size, 0


def make(placement: ExpertPlacement | None = None, **changed: int | str) -> MC2:
    placement = ExpertPlacement.linear(8, 2) if placement is None else placement
    return MC2(Ranks(placement.ep_size), placement, **(SIZES | changed))


def test_the_buffer_of_the_reported_case():
    """128 tokens, 16 ranks, 16 experts each, top-8, H = 7168: 452 MiB against a default of 200."""
    with pytest.raises(ConfigError, match=r"HCCL_BUFFSIZE = 200, but it must be at least 452 .*HCCL_BUFFSIZE=452"):
        make(ExpertPlacement.linear(256, 16), max_tokens=128, hidden_size=7168, top_k=8)


@pytest.mark.parametrize(("given", "enough"), [("451", False), ("452", True), ("500 MB", False), ("", False)])
def test_the_buffer_that_is_set(given, enough, monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", given)
    sizes = {"max_tokens": 128, "hidden_size": 7168, "top_k": 8}
    if enough:
        make(ExpertPlacement.linear(256, 16), **sizes)
    else:
        with pytest.raises(ConfigError, match="HCCL_BUFFSIZE"):
            make(ExpertPlacement.linear(256, 16), **sizes)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"max_tokens": 257}, CapacityError),
        ({"max_tokens": 0}, CapacityError),
        ({"top_k": 17}, ShapeError),
        ({"top_k": 0}, ShapeError),
        ({"hidden_size": 48}, ShapeError),
        ({"hidden_size": 7200}, ShapeError),
        ({"placement": ExpertPlacement.linear(5, 2)}, PlacementError),
        ({"placement": ExpertPlacement.of((0, 0, 0, 1), 2)}, PlacementError),
        ({"placement": ExpertPlacement.linear(1026, 2)}, PlacementError),
        ({"placement": ExpertPlacement.linear(4, 1)}, InvalidValueError),
    ],
    ids=str,
)
def test_sizes_that_the_operators_do_not_take(changed, error, monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "100000")
    make(max_tokens=256, top_k=2, hidden_size=7168)
    make(max_tokens=512, top_k=2, hidden_size=8192, product="atlas-a3")
    with pytest.raises(error, match="but it must be"):
        make(**changed)


def test_a_group_with_a_part_of_the_experts_counts_those():
    """4 of 8 experts live on this group's ranks, as where TP ranks have the same tokens."""
    part = ExpertPlacement.linear(8, 4).restrict([0, 2])
    make(part, top_k=4)
    with pytest.raises(ShapeError, match="top_k = 5, but it must be 1 to 4"):
        make(part, top_k=5)


def dispatch(
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int] = (3, 8),
    hidden_size: int = 64,
    top_k: int = 2,
    **options: torch.Tensor,
) -> object:
    ids = torch.zeros(3, top_k, dtype=torch.int32)
    given = torch.zeros(3, hidden_size, dtype=dtype), torch.ones(3, top_k), ids
    return make().dispatch(*given, num_experts=8, layout=TokenLayout.of(sizes, 0), **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sizes": (3, 9)}, CapacityError, "max_local_size = 9, but it must be at most 8"),
        ({"dtype": torch.float32}, DtypeError, "bfloat16 or float16"),
        ({"hidden_size": 128}, ShapeError, r"\(H, K\) of the tokens = \(128, 2\), but it must be \(64, 2\)"),
        ({"top_k": 3}, ShapeError, r"\(H, K\) of the tokens = \(64, 3\), but it must be \(64, 2\)"),
        ({"dtype": torch.int8, "scales": torch.ones(3)}, UnsupportedError, "quantize=True"),
    ],
    ids=["another rank's tokens", "fp32", "wider", "more choices", "quantised already"],
)
def test_refused_before_the_operator(options: dict, error: type[AscendMoEError], text: str):
    with pytest.raises(error, match=text):
        dispatch(**options)
