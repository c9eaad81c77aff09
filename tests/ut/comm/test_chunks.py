"""Chunks of a layout: the arithmetic alone; what a layer does with them is tested with the layer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.errors import LayoutError
from vllm_ascend_moe.layout import TokenLayout

sizes_and_bound = st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 45))


@given(sizes_and_bound)
def test_every_rank_gets_the_same_size_vectors_within_the_bound(drawn):
    sizes, bound = drawn
    per_rank = [TokenLayout.of(sizes, rank).chunks(bound) for rank in range(len(sizes))]
    vectors = [[chunk.local_sizes for chunk in chunks] for chunks in per_rank]
    assert vectors.count(vectors[0]) == len(sizes)
    assert all(chunk.rank == rank for rank, chunks in enumerate(per_rank) for chunk in chunks)
    assert max(size for vector in vectors[0] for size in vector) <= bound
    # No more chunks than needed, and one even where nobody has a token: every rank enters its collectives.
    assert len(vectors[0]) == max(1, -(-max(sizes) // bound))


@given(sizes_and_bound)
def test_each_ranks_rows_are_covered_once_and_in_order(drawn):
    sizes, bound = drawn
    for rank, size in enumerate(sizes):
        parts = torch.arange(size).split([chunk.local_size for chunk in TokenLayout.of(sizes, rank).chunks(bound)])
        assert torch.cat(parts).tolist() == list(range(size))
        # A row is in the same chunk on whatever rank it is, so that no rank is a chunk ahead of another.
        assert all(row // bound == i for i, part in enumerate(parts) for row in part.tolist())


def test_the_field_case_that_hung():
    """Bound 4, sizes [9, 3, 4]: ranks that computed different vectors waited for each other for ever."""
    for rank in range(3):
        vectors = [chunk.local_sizes for chunk in TokenLayout.of([9, 3, 4], rank).chunks(4)]
        assert vectors == [(4, 3, 4), (4, 0, 0), (1, 0, 0)]


def test_what_fits_is_one_chunk_and_the_layout_itself():
    layout = TokenLayout.of([4, 1], 1)
    assert layout.chunks(4) == layout.chunks(100) == (layout,)
    assert layout.chunks(4)[0] is layout
    assert layout.chunks(3) is layout.chunks(3)
    assert [chunk.local_sizes for chunk in TokenLayout.of([0, 0], 0).chunks(8)] == [(0, 0)]


@pytest.mark.parametrize("bound", [0, -1, 2.0, True])
def test_a_bound_that_is_no_count_is_refused(bound):
    with pytest.raises(LayoutError, match="max_tokens"):
        TokenLayout.of([4], 0).chunks(bound)
