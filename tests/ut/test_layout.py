"""TokenLayout and expand_local_sizes: the arithmetic against brute force and against vLLM's own DPMetadata.

Proves shapes, row numbers and pictures for any sizes and any DP x PCP x TP. Does not move a tensor between ranks.
"""

import doctest
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.forward_context import DPMetadata

import vllm_ascend_moe.layout
import vllm_ascend_moe.testing.data
from vllm_ascend_moe.errors import LayoutError
from vllm_ascend_moe.layout import TokenLayout, expand_local_sizes

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12)
GROUP = st.integers(1, 4)
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@pytest.mark.parametrize("module", [vllm_ascend_moe.layout, vllm_ascend_moe.testing.data], ids=lambda m: m.__name__)
def test_the_examples_of_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# -- rows ------------------------------------------------------------------------------------------------------


@given(sizes=SIZES)
def test_rows_match_a_gather_done_by_hand(sizes):
    """Pads each rank's list of (rank, token) to M by hand, and reads every property off the joined list."""
    longest = max(sizes)
    rows = [(r, i) if i < size else None for r, size in enumerate(sizes) for i in range(longest)]
    for rank in range(len(sizes)):
        layout = TokenLayout.of(sizes, rank)
        assert layout.padded_tokens == layout.ep_size * layout.max_local_size == len(rows)
        assert layout.num_tokens == sum(row is not None for row in rows)
        assert layout.pad_rows == sum(row is None for row in rows)
        assert layout.local_size == sizes[rank]
        assert layout.is_uniform == (None not in rows)
        assert layout.valid_rows().tolist() == [row is not None for row in rows]
        for other in range(len(sizes)):
            assert [rows[row] for row in layout.rows_of(other)] == [(other, i) for i in range(sizes[other])]


@given(sizes=SIZES)
def test_rows_of_ranks_are_disjoint_and_cover_the_valid_rows(sizes):
    layout = TokenLayout.of(sizes, 0)
    rows = [row for rank in range(layout.ep_size) for row in layout.rows_of(rank)]
    assert len(rows) == len(set(rows)) == layout.num_tokens
    assert rows == layout.valid_rows().nonzero().flatten().tolist()


def test_valid_rows_is_a_new_tensor_each_time_and_on_the_asked_device():
    layout = TokenLayout.of([2, 1], 0)
    first = layout.valid_rows()
    first.zero_()
    assert layout.valid_rows().tolist() == [True, True, True, False]
    assert layout.valid_rows("meta").device.type == "meta"
    assert layout.valid_rows("meta").shape == (4,)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rows_of_an_unknown_rank_is_refused(rank):
    with pytest.raises(LayoutError, match="0 to 1"):
        TokenLayout.of([1, 1], 0).rows_of(rank)


# -- construction ----------------------------------------------------------------------------------------------


@given(counts=COUNTS, pcp=GROUP, tp=GROUP, data=st.data())
def test_from_dp_is_the_nested_loop_over_dp_pcp_tp(counts, pcp, tp, data):
    dp_rank = data.draw(st.integers(0, len(counts) - 1))
    pcp_rank, tp_rank = data.draw(st.integers(0, pcp - 1)), data.draw(st.integers(0, tp - 1))
    expected, mine = [], None
    for dp, count in enumerate(counts):
        for p in range(pcp):
            for t in range(tp):
                if (dp, p, t) == (dp_rank, pcp_rank, tp_rank):
                    mine = len(expected)
                # The rows of TP rank t of a sequence padded to a multiple of TP.
                padded = list(range(count)) + [None] * (-count % tp)
                expected.append(len(padded) // tp)
    layout = TokenLayout.from_dp(counts, dp_rank=dp_rank, pcp_rank=pcp_rank, tp_rank=tp_rank, tp_size=tp, pcp_size=pcp)
    assert layout.local_sizes == tuple(expected)
    assert layout.rank == mine


@given(counts=COUNTS, pcp=GROUP, tp=GROUP)
def test_from_dp_equals_the_sizes_vllm_computes(counts, pcp, tp):
    metadata = DPMetadata(torch.tensor(counts, dtype=torch.int32))
    with metadata.sp_local_sizes(tp, pcp, use_ep=True):
        theirs = TokenLayout.from_dp_metadata(
            metadata, rank=0, ep_size=len(counts) * pcp * tp, dp_size=len(counts), pcp_size=pcp
        )
    assert theirs == TokenLayout.from_dp(counts, dp_rank=0, tp_size=tp, pcp_size=pcp)


def test_from_dp_metadata_outside_vllms_context_is_none():
    metadata = DPMetadata(torch.tensor([3, 1], dtype=torch.int32))
    assert TokenLayout.from_dp_metadata(metadata, rank=0, ep_size=2, dp_size=2) is None


def test_from_dp_metadata_of_another_topology_is_none():
    metadata = DPMetadata(torch.tensor([3, 1], dtype=torch.int32))
    with metadata.sp_local_sizes(1):
        assert TokenLayout.from_dp_metadata(metadata, rank=0, ep_size=4, dp_size=2) is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: TokenLayout.of([], 0), "at least one size", id="no ranks"),
        pytest.param(lambda: TokenLayout.of([1, -1], 0), r"local_sizes\[1\] = -1", id="negative size"),
        pytest.param(lambda: TokenLayout.of([1.0, 2], 0), "integers", id="float size"),
        pytest.param(lambda: TokenLayout((1.0, 2), 0), r"local_sizes\[0\] = 1.0", id="float size, direct"),
        pytest.param(lambda: TokenLayout((True, 2), 0), r"local_sizes\[0\] = True", id="bool size, direct"),
        pytest.param(lambda: TokenLayout.of([1, 2], 2), "rank = 2", id="rank too high"),
        pytest.param(lambda: TokenLayout.of([1, 2], -1), "rank = -1", id="rank negative"),
        pytest.param(lambda: TokenLayout.from_dp([1], dp_rank=1), "dp_rank = 1", id="dp_rank too high"),
        pytest.param(lambda: TokenLayout.from_dp([1], dp_rank=0, tp_rank=2, tp_size=2), "tp_rank = 2", id="tp_rank"),
        pytest.param(lambda: TokenLayout.from_dp([1], dp_rank=0, pcp_rank=1), "pcp_rank = 1", id="pcp_rank too high"),
        pytest.param(lambda: TokenLayout.from_dp([1], dp_rank=0, tp_size=0), "tp_size = 0", id="tp_size 0"),
        pytest.param(lambda: TokenLayout.from_dp([-1], dp_rank=0), r"local_sizes\[0\] = -1", id="negative DP count"),
        pytest.param(lambda: expand_local_sizes([1], ep_size=0, dp_size=1), "ep_size = 0", id="ep_size 0"),
        pytest.param(lambda: expand_local_sizes([1], ep_size=1, dp_size=True), "dp_size = True", id="bool dp_size"),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(LayoutError, match=message):
        build()


@pytest.mark.parametrize(
    "sizes",
    [np.array([2, 1]), torch.tensor([2, 1]), iter([2, 1]), (np.int32(2), np.int64(1))],
    ids=["numpy array", "tensor", "iterator", "numpy scalars"],
)
def test_sizes_of_any_integer_kind_become_python_ints(sizes):
    """VA #5521: a tensor where an int was needed."""
    layout = TokenLayout.of(sizes, 0)
    assert layout.local_sizes == (2, 1)
    assert [type(n) for n in (*layout.local_sizes, layout.max_local_size, layout.num_tokens)] == [int] * 4


def test_layouts_are_cached_hashed_compared_and_pickled_by_value():
    layout = TokenLayout.of([3, 0, 2], 1)
    assert TokenLayout.of((3, 0, 2), 1) is layout
    direct = TokenLayout((3, 0, 2), 1)
    assert direct == layout
    assert hash(direct) == hash(layout)
    assert len({layout, direct, TokenLayout.of([3, 0, 2], 0), TokenLayout.of([3, 0, 1], 1)}) == 3
    copied = pickle.loads(pickle.dumps(layout))
    assert copied == layout
    assert (copied.max_local_size, copied.num_tokens) == (3, 5)
    with pytest.raises(AttributeError):
        layout.rank = 0


# -- expand_local_sizes ----------------------------------------------------------------------------------------


@given(counts=COUNTS, pcp=GROUP, tp=GROUP)
def test_expand_lists_of_vllm_from_0_31(counts, pcp, tp):
    """From 0.31 vLLM's list already has one size per EP rank; it is taken as it is, as Python ints."""
    metadata, dp = DPMetadata(torch.tensor(counts, dtype=torch.int32)), len(counts)
    with metadata.sp_local_sizes(tp, pcp, use_ep=True) as reported:
        assert expand_local_sizes(reported, ep_size=dp * pcp * tp, dp_size=dp, pcp_size=pcp) == tuple(reported)


@given(counts=COUNTS, pcp=GROUP, tp=GROUP)
def test_expand_lists_of_vllm_before_0_31(counts, pcp, tp):
    """Before 0.31 the list was DP x SP; expanded, it is what 0.31 reports for the same topology."""
    metadata, dp = DPMetadata(torch.tensor(counts, dtype=torch.int32)), len(counts)
    with metadata.sp_local_sizes(tp) as before:
        old = list(before)
    with metadata.sp_local_sizes(tp, pcp, use_ep=True) as reported:
        new = tuple(reported)
    assert expand_local_sizes(old, ep_size=dp * pcp * tp, dp_size=dp, pcp_size=pcp) == new


@pytest.mark.parametrize(
    ("sizes", "ep_size", "dp_size", "pcp_size"),
    [
        pytest.param([2, 2, 2], 8, 2, 2, id="3 sizes for 8 ranks"),
        pytest.param([5, 2], 4, 2, 1, id="DP sizes where EP has TP too (no SP)"),
        pytest.param([5, 2, 1], 6, 2, 2, id="not a multiple of DP"),
        pytest.param([1, 2, 3, 4, 5], 4, 2, 1, id="more sizes than ranks"),
        pytest.param([], 4, 2, 2, id="no sizes"),
    ],
)
def test_expand_of_a_list_that_does_not_match_is_none(sizes, ep_size, dp_size, pcp_size):
    assert expand_local_sizes(sizes, ep_size=ep_size, dp_size=dp_size, pcp_size=pcp_size) is None


def test_va_16477_dp2_pcp2_tp2_keeps_the_order_dp_pcp_tp():
    """DP tokens 5 and 2: SP chunks of 3 and 1, on both PCP ranks of each DP rank; rank = (dp*2 + pcp)*2 + tp."""
    assert expand_local_sizes([3, 3, 1, 1], ep_size=8, dp_size=2, pcp_size=2) == (3, 3, 3, 3, 1, 1, 1, 1)
    # Uneven SP chunks show the order: it is pcp outside, tp inside.
    assert expand_local_sizes([3, 2, 1, 0], ep_size=8, dp_size=2, pcp_size=2) == (3, 2, 3, 2, 1, 0, 1, 0)


# -- pictures --------------------------------------------------------------------------------------------------


@given(sizes=SIZES | st.lists(st.integers(0, 10_000), min_size=1, max_size=4), width=st.integers(2, 64))
def test_a_picture_never_hides_tokens_or_pad(sizes, width):
    layout = TokenLayout.of(sizes, 0)
    head, *lines = layout.render(width).split("\n")
    assert f"{sum(sizes)} tokens on {len(sizes)} ranks" in head
    assert len(lines) == len(sizes)
    bars = [line.split("|")[1] for line in lines]
    assert {len(bar) for bar in bars} == {min(layout.max_local_size, width)}
    for size, bar in zip(sizes, bars, strict=True):
        assert bar.lstrip("#").strip(".") == ""  # tokens first, then pad, nothing else
        if layout.max_local_size > 1:
            assert ("#" in bar) == (size > 0)
            assert ("." in bar) == (size < layout.max_local_size)
        if layout.max_local_size <= width:
            assert bar.count("#") == size


@pytest.mark.parametrize("width", [-3, 0, 1])
@pytest.mark.parametrize("sizes", [[3, 0, 2], [0, 0], [1]], ids=str)
def test_a_picture_narrower_than_two_cells_is_drawn_two_wide(sizes, width):
    """One cell cannot show both tokens and pad."""
    layout = TokenLayout.of(sizes, 0)
    assert layout.render(width) == layout.render(2)


def test_a_picture_of_no_tokens():
    assert str(TokenLayout.of([0, 0], 1)) == (
        "TokenLayout: 0 tokens on 2 ranks, padded to 0 rows (max_local_size 0, 0 pad rows)\n"
        "rank 0 || no tokens\n"
        "rank 1 || no tokens  <- this rank"
    )


def test_a_picture_of_one_rank():
    assert str(TokenLayout.of([3], 0)).split("\n")[1] == "rank 0 |###| rows 0-2  <- this rank"


def test_a_picture_of_a_hundred_ranks_lines_up():
    lines = str(TokenLayout.of(range(100), 7)).split("\n")[1:]
    assert len(lines) == 100
    assert {line.index("|") for line in lines} == {8}  # "rank 99 |"
    assert [line for line in lines if "this rank" in line] == [lines[7]]
    assert lines[99].endswith("rows 9801-9899")  # 99 * M .. 99 * M + 98, M = 99
