"""The uneven collectives of our CPU communicator, on real gloo processes, against what one process computes.

What this does not prove: vLLM's own quantised methods on top of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.testing.launch import launch

pytestmark = pytest.mark.multiprocess

SIZES = ([3, 1, 2], [0, 4, 1], [0, 0, 0], [2, 2, 2])
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.uint32, torch.float8_e4m3fn)


def rank_rows(sizes: list[int], rank: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that say whose they are; values small enough for every dtype."""
    rows = torch.arange(sizes[rank] * width).view(sizes[rank], width) % 7 + rank
    return rows.to(torch.float32).to(dtype) if dtype == torch.float8_e4m3fn else rows.to(dtype)


def make_communicator() -> Any:
    from vllm_ascend_moe.integration.communicator import AscendMoECpuCommunicator

    world = dist.group.WORLD
    return AscendMoECpuCommunicator(world, torch.device("cpu"), world, unique_name="dp:0")


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))


def gather_body(rank: int, world_size: int) -> list[str]:
    communicator, wrong = make_communicator(), []
    for sizes in SIZES:
        for dtype in DTYPES:
            parts = [rank_rows(sizes, r, 4, dtype) for r in range(world_size)]
            expected = torch.cat(parts)
            found = communicator.all_gatherv(parts[rank], dim=0, sizes=sizes)
            if not same(found, expected):
                wrong.append(f"gather {sizes} {dtype}")
            [twice, again] = communicator.all_gatherv([parts[rank], parts[rank]], dim=0, sizes=sizes)
            if not (same(twice, expected) and same(again, expected)):
                wrong.append(f"gather list {sizes} {dtype}")
        sideways = [rank_rows(sizes, r, 4, torch.float32).T for r in range(world_size)]
        if not same(communicator.all_gatherv(sideways[rank], dim=1, sizes=sizes), torch.cat(sideways, dim=1)):
            wrong.append(f"gather dim 1 {sizes}")
    even = torch.full((2, 3), float(rank))
    if not same(
        communicator.all_gatherv(even), torch.arange(3.0).repeat_interleave(2)[:, None].expand(6, 3).contiguous()
    ):
        wrong.append("gather without sizes")
    return wrong


def reduce_body(rank: int, world_size: int) -> list[str]:
    communicator, wrong = make_communicator(), []
    for sizes in SIZES:
        torch.manual_seed(sum(sizes))
        whole = [torch.randn(sum(sizes), 4) for _ in range(world_size)]
        expected = sum(whole).split(sizes)[rank]
        if not torch.allclose(
            communicator.reduce_scatterv(whole[rank].clone(), dim=0, sizes=sizes), expected, atol=1e-6
        ):
            wrong.append(f"reduce {sizes}")
        across = communicator.reduce_scatterv(whole[rank].T.clone(), dim=1, sizes=sizes)
        if not torch.allclose(across, expected.T, atol=1e-6) or not across.is_contiguous():
            wrong.append(f"reduce dim 1 {sizes}")
    x = torch.arange(6.0).view(6, 1) + rank
    if communicator.reduce_scatter(x, dim=0).tolist() != [[3 * (2 * rank) + 3.0], [3 * (2 * rank + 1) + 3.0]]:
        wrong.append("reduce_scatter")
    return wrong


def error_body(rank: int, world_size: int) -> list[str]:
    from vllm_ascend_moe.errors import ShapeError

    communicator, texts = make_communicator(), []
    x = torch.zeros(2, 3)
    for call in (
        lambda: communicator.all_gatherv(x, sizes=[2, 2]),
        lambda: communicator.all_gatherv(x, sizes=[1, 1, 1]),
        lambda: communicator.reduce_scatterv(x, dim=0, sizes=[2, 2, 2]),
        lambda: communicator.reduce_scatter(torch.zeros(4, 3), dim=0),
    ):
        try:
            call()
        except ShapeError as error:
            texts.append(str(error))
    return texts


def body(rank: int, world_size: int) -> tuple[list[str], list[str], list[str]]:
    """All of the above in one group, since starting processes takes longer than what they do."""
    return gather_body(rank, world_size), reduce_body(rank, world_size), error_body(rank, world_size)


@pytest.fixture(scope="module")
def by_rank() -> list[tuple[list[str], list[str], list[str]]]:
    return launch(3, body)


def test_all_gatherv(by_rank) -> None:
    assert [wrong for wrong, _, _ in by_rank] == [[], [], []]


def test_reduce_scatterv(by_rank) -> None:
    assert [wrong for _, wrong, _ in by_rank] == [[], [], []]


def test_contradictions_are_errors_before_the_collective(by_rank) -> None:
    for _, _, texts in by_rank:
        assert len(texts) == 4
        assert "len(sizes) = 2" in texts[0]
        assert "input.shape[0] = 2, but it must be sizes[" in texts[1]
        assert "sum(sizes) = 6" in texts[2]
        assert "input.shape[0] = 4" in texts[3]
