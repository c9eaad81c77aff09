"""The style in which vllm-ascend tests these operators: module-level names patched, implementations called as plain
functions, contexts and groups that have only what is needed.

Proves that our module can stand in for theirs under such tests. One rank at a time, so nothing is proved about ranks
meeting; test_custom_ops.py does that.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm_ascend_moe.ops import register_custom_ops as custom_ops

SIZES = [1, 1, 3, 3]


def _gather_rank_by_rank(x, dim):
    """Each rank's rows are this rank's plus 100 per rank."""
    assert dim == 0
    assert x.is_contiguous()
    return torch.cat([x + 100 * rank for rank in range(4)])


def _reduce_block(rank):
    def reduce_scatter(x, dim):
        assert dim == 0
        assert x.is_contiguous()
        return x.view(4, -1, *x.shape[1:])[rank].clone()

    return reduce_scatter


@pytest.fixture(params=range(4), ids=lambda rank: f"rank {rank}")
def rank(request, monkeypatch):
    metadata = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: list(SIZES))
    context = SimpleNamespace(dp_metadata=metadata)
    group = SimpleNamespace(
        world_size=4,
        rank_in_group=request.param,
        all_gather=_gather_rank_by_rank,
        reduce_scatter=_reduce_block(request.param),
    )
    monkeypatch.setattr(custom_ops, "get_forward_context", lambda: context)
    monkeypatch.setattr(custom_ops, "get_ep_group", lambda: group)
    return request.param


def test_gather_keeps_the_padded_layout(rank):
    x = torch.arange(SIZES[rank] * 4.0).view(-1, 4) + 1
    out = custom_ops._maybe_all_gather_and_maybe_unpad_impl(x)
    blocks = out.view(4, 3, 4)
    for other in range(4):
        assert torch.equal(blocks[other, : SIZES[rank]], x + 100 * other)
        assert torch.equal(blocks[other, SIZES[rank] :], torch.full((3 - SIZES[rank], 4), 100.0 * other))


def test_reduce_returns_this_ranks_rows(rank):
    x = torch.arange(48).view(12, 4)
    out = custom_ops._maybe_pad_and_reduce_impl(x)
    assert torch.equal(out, x[3 * rank : 3 * rank + SIZES[rank]])


def test_fake_shapes(rank):
    gathered = custom_ops._maybe_all_gather_and_maybe_unpad_fake(torch.empty(SIZES[rank], 4))
    reduced = custom_ops._maybe_pad_and_reduce_fake(torch.empty(12, 4))
    assert gathered.shape == (12, 4)
    assert reduced.shape == (SIZES[rank], 4)


def test_pcp_sizes_are_expanded(rank, monkeypatch):
    monkeypatch.setattr(custom_ops, "get_dp_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(custom_ops, "get_pcp_group", lambda: SimpleNamespace(world_size=2))
    metadata = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: [5, 2])
    assert custom_ops._get_ep_local_sizes(metadata, custom_ops.get_ep_group()) == [5, 5, 2, 2]


def test_no_dp_metadata(rank, monkeypatch):
    monkeypatch.setattr(custom_ops, "get_forward_context", lambda: SimpleNamespace(dp_metadata=None))
    assert custom_ops._maybe_all_gather_and_maybe_unpad_impl(torch.ones(3, 4)).shape == (12, 4)
    assert custom_ops._maybe_pad_and_reduce_impl(torch.ones(12, 4)).shape == (3, 4)
