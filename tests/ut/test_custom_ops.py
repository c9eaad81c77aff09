"""The two operators on all ranks of a topology, called through the dispatcher, over hand-written groups.

Proves which rows come back in every case of the module's docstring (layout, DP metadata, neither, sizes that do not
match EP, PCP, one rank), contiguity of what collectives get, dtypes, pad values, errors, and that nothing aliases.
Does not prove anything about a real backend or torch.compile: test_custom_ops_compile.py does.
"""

from types import SimpleNamespace

import pytest
import torch
from marked_rows import padded, rows
from ops_world import (
    context,
    dp_metadata,
    gather,
    layout_context,
    ops,
    reduce,
)
from vllm.forward_context import DPMetadata

from vllm_ascend_moe.errors import LayoutError, ShapeError
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY, ForwardLayouts
from vllm_ascend_moe.testing.compare import assert_equal

SIZES = [[2, 0, 3], [1, 1, 3, 3], [4, 4], [0, 0], [5], [0], [0, 2]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]


def round_trip(groups, sizes, group="ep", share=None):
    """Gathers this rank's rows, checks them, and reduces each rank's share of them; returns the tokens that come back.

    The shares are exact binary fractions that sum to 1 over ranks, as the weights of identity experts do.
    """
    here = getattr(groups, group)
    rank, ranks = here.rank_in_group, here.world_size
    out = gather(rows(rank, sizes[rank]))
    assert_equal(out, padded(sizes), what="gathered")
    share = share or (2.0 ** -(rank + 1) if rank < ranks - 1 else 2.0**-rank)
    return reduce(out * share)


# -- which rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layout_of_the_forward_context(world, sizes):
    results = world.run_layout(sizes, lambda groups: round_trip(groups, sizes))
    for rank, back in enumerate(results):
        assert_equal(back, rows(rank, sizes[rank]), what=f"rank {rank}")
    collectives = ["all_gather", "reduce_scatter"] if len(sizes) > 1 and sum(sizes) else []
    assert world.calls == [collectives] * len(sizes)


@pytest.mark.parametrize(
    ("counts", "tp", "sizes"),
    [
        pytest.param([5, 2], 2, [3, 3, 1, 1], id="DP=2 TP=2 with SP"),
        pytest.param([5, 0, 2], 1, [5, 0, 2], id="DP=3"),
        pytest.param([3], 4, [1, 1, 1, 1], id="DP=1 TP=4 with SP"),
    ],
)
def test_dp_metadata_while_vllm_has_set_the_local_sizes(world, counts, tp, sizes):
    def body(groups):
        with ops.get_forward_context().dp_metadata.sp_local_sizes(tp):
            return round_trip(groups, sizes)

    results = world.sized(dp=len(counts), tp=tp).run(lambda groups: context(dp_metadata(counts)), body)
    for rank, back in enumerate(results):
        assert_equal(back, rows(rank, sizes[rank]), what=f"rank {rank}")


@pytest.mark.parametrize("reported", ["before 0.31", "from 0.31"])
def test_pcp_lists_of_both_kinds(world, reported):
    """DP=2 PCP=2 TP=2, DP tokens 5 and 2: before 0.31 vLLM reports DP x SP, from then on DP x PCP x SP."""
    sizes = [3, 3, 3, 3, 1, 1, 1, 1]

    def body(groups):
        with ops.get_forward_context().dp_metadata.sp_local_sizes(2, 2 if reported == "from 0.31" else 1, use_ep=True):
            assert len(ops.get_forward_context().dp_metadata.local_sizes) == (8 if reported == "from 0.31" else 4)
            return round_trip(groups, sizes)

    results = world.sized(dp=2, pcp=2, tp=2).run(lambda groups: context(dp_metadata([5, 2])), body)
    for rank, back in enumerate(results):
        assert_equal(back, rows(rank, sizes[rank]), what=f"rank {rank}")


@pytest.mark.parametrize("local_sizes", ["set", "not set"])
def test_dp2_tp2_without_sp_goes_over_the_dp_group_at_the_common_length(world, local_sizes):
    """vLLM reports one count per DP rank, which does not describe the 4 EP ranks: TP ranks hold the same tokens."""
    counts = [5, 2]

    def body(groups):
        metadata = ops.get_forward_context().dp_metadata
        if local_sizes == "not set":
            return round_trip(groups, counts, group="dp")
        with metadata.sp_local_sizes(1):
            return round_trip(groups, counts, group="dp")

    results = world.sized(dp=2, tp=2).run(lambda groups: context(dp_metadata(counts)), body)
    for rank, back in enumerate(results):
        assert_equal(back, rows(rank // 2, counts[rank // 2]), what=f"rank {rank}")


@pytest.mark.parametrize("group", ["dp", "pcp"])
def test_the_active_layout_says_which_group_communicates(world, group):
    world.sized(**{group: 2}, tp=2)
    sizes = [1, 4]
    results = world.run(
        lambda groups: layout_context(sizes, getattr(groups, group).rank_in_group, group),
        lambda groups: round_trip(groups, sizes, group=group),
    )
    for rank, back in enumerate(results):
        assert_equal(back, rows(rank // 2, sizes[rank // 2]), what=f"rank {rank}")


def test_without_metadata_all_ranks_have_as_many_rows(world):
    results = world.sized(tp=3).run(lambda groups: context(), lambda groups: round_trip(groups, [2, 2, 2]))
    for rank, back in enumerate(results):
        assert_equal(back, rows(rank, 2), what=f"rank {rank}")


def test_the_platforms_layout_wins_over_dp_metadata(world):
    """One is computed for this forward; the other may describe the layer of another group."""

    def make_context(groups):
        made = layout_context([2, 1], groups.ep.rank_in_group)
        made.dp_metadata = dp_metadata([7, 7])
        return made

    results = world.sized(dp=2).run(make_context, lambda groups: round_trip(groups, [2, 1]))
    assert [back.shape[0] for back in results] == [2, 1]


def test_no_layouts_in_this_forward_falls_back_to_dp_metadata(world):
    results = world.sized(dp=2).run(
        lambda groups: context(dp_metadata([2, 1]), **{FORWARD_LAYOUTS_KEY: ForwardLayouts()}),
        lambda groups: round_trip(groups, [2, 1]),
    )
    assert [back.shape[0] for back in results] == [2, 1]


# -- tensors of every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("sizes", [[3, 1], [2, 2], [2]], ids=str)
def test_every_dtype_is_kept_and_padded_by_its_kind(world, sizes, dtype):
    pad = -1 if dtype in (torch.int32, torch.int64) else 0

    def body(groups):
        rank = groups.ep.rank_in_group
        out = gather(rows(rank, sizes[rank], dtype=dtype))
        only_mine = torch.zeros_like(out)
        mine = slice(rank * max(sizes), (rank + 1) * max(sizes))
        only_mine[mine] = out[mine]
        return out, reduce(only_mine)

    for rank, (out, back) in enumerate(world.run_layout(sizes, body)):
        assert_equal(out, padded(sizes, pad, dtype=dtype), what=f"gathered on rank {rank}")
        assert_equal(back, rows(rank, sizes[rank], dtype=dtype), what=f"reduced on rank {rank}")


@pytest.mark.parametrize("sizes", [[3, 1], [2, 2], [0, 2], [0, 0], [2]], ids=str)
@pytest.mark.parametrize("tail", [(), (5,), (4, 2)], ids=["1-D", "2-D", "3-D"])
def test_one_to_three_dimensions(world, sizes, tail):
    def body(groups):
        rank = groups.ep.rank_in_group
        out = gather(rows(rank, sizes[rank], 1).view(-1, *[1] * len(tail)).expand(-1, *tail))
        return out, reduce(out * (rank == 0))

    for rank, (out, back) in enumerate(world.run_layout(sizes, body)):
        assert_equal(out, padded(sizes, width=1).view(-1, *[1] * len(tail)).expand(-1, *tail))
        assert_equal(back, rows(rank, sizes[rank], 1).view(-1, *[1] * len(tail)).expand(-1, *tail))


def _every_second_column(n):
    return torch.arange(n * 8.0).view(n, 8)[:, ::2]


def _transposed(n):
    return torch.arange(n * 4.0).view(4, n).t()


def _sliced_on_dim_1(n):
    """(n, 2, 4) of an (n, 3, 4) buffer."""
    return torch.arange(n * 12.0).view(n, 3, 4)[:, 1:]


def _one_slice_of_dim_1(n):
    """(n, 4) of an (n, 3, 4) buffer: rows are contiguous, the tensor is not."""
    return torch.arange(n * 12.0).view(n, 3, 4)[:, 1]


@pytest.mark.parametrize(
    "strided",
    [_every_second_column, _transposed, _sliced_on_dim_1, _one_slice_of_dim_1],
    ids=["x[:, ::2]", "transposed", "buffer sliced on dim 1", "one slice of dim 1"],
)
@pytest.mark.parametrize("sizes", [[4, 4], [4, 2], [3]], ids=str)
def test_strided_inputs_reach_collectives_contiguous(world, sizes, strided):
    """The fake group refuses strided inputs (NCCL and HCCL corrupt them). Outputs are contiguous, as the fake says."""

    def body(groups):
        rank = groups.ep.rank_in_group
        x = strided(sizes[rank])
        y = strided(len(sizes) * max(sizes))
        return x, gather(x), y, reduce(y)

    results = world.run_layout(sizes, body)
    expected = torch.cat([torch.cat([x, x.new_zeros(max(sizes) - len(x), *x.shape[1:])]) for x, _, _, _ in results])
    for rank, (x, out, y, back) in enumerate(results):
        assert not (x.is_contiguous() and y.is_contiguous())
        assert_equal(out, expected)
        assert_equal(back, y[rank * max(sizes) :][: sizes[rank]] * len(sizes))
        assert out.is_contiguous()
        assert back.is_contiguous()


# -- aliasing --------------------------------------------------------------------------------------------------


def _storage(x):
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("sizes", [[4], [3, 3], [1, 3]], ids=str)
@pytest.mark.parametrize("metadata", ["layout", "DP metadata", "none"])
def test_no_output_shares_memory_with_its_input(world, sizes, metadata):
    """Also where nothing is padded and where the group returns its input, as vLLM's does on one rank."""
    sizes = sizes if metadata != "none" else [3] * len(sizes)

    def make_context(groups):
        if metadata == "layout":
            return layout_context(sizes, groups.ep.rank_in_group)
        return context(dp_metadata(sizes) if metadata == "DP metadata" else None)

    def body(groups):
        x = rows(groups.ep.rank_in_group, sizes[groups.ep.rank_in_group])
        before = x.clone()
        out = gather(x)
        back = reduce(out)
        assert len({_storage(x), _storage(out), _storage(back)}) == 3
        held = out.clone()
        back.fill_(-5)
        assert_equal(out, held)
        out.fill_(-7)
        assert_equal(x, before)

    world.sized(dp=len(sizes)).run(make_context, body)


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[2, 1], [2]], ids=str)
def test_more_rows_than_max_local_size_is_an_error_and_never_cut(world, sizes):
    with pytest.raises(LayoutError, match=r"x.shape\[0\] = 3, but it must be at most max_local_size = 2"):
        world.run_layout(sizes, lambda groups: gather(rows(0, 3)))


@pytest.mark.parametrize("wrong", [0, 3, 5, 8])
def test_a_reduce_of_other_than_padded_rows_is_an_error(world, wrong):
    with pytest.raises(ShapeError, match=r"2 \* 2 = 4"):
        world.run_layout([2, 1], lambda groups: reduce(rows(0, wrong)))


def test_without_metadata_rows_that_do_not_divide_are_an_error(world):
    with pytest.raises(LayoutError, match="a multiple of ep_size = 2"):
        world.sized(tp=2).run(lambda groups: context(), lambda groups: reduce(rows(0, 3)))


def test_a_group_without_layout_in_this_forward_is_an_error(world):
    def body(groups):
        with ops.get_forward_context().additional_kwargs[FORWARD_LAYOUTS_KEY].use("pcp"):
            gather(rows(0, 1))

    with pytest.raises(LayoutError, match=r"group = 'pcp', but it must be one of \['ep'\]"):
        world.sized(dp=2).run(lambda groups: layout_context([1, 1], groups.ep.rank_in_group), body)


def test_use_restores_the_group_before_also_after_an_error():
    layouts = ForwardLayouts()
    with layouts.use("dp"):
        with pytest.raises(KeyError), layouts.use("pcp"):
            raise KeyError(layouts.active)
        assert layouts.active == "dp"
    assert layouts.active is None


# -- what decides the sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(None, id="no metadata"),
        pytest.param(DPMetadata(torch.tensor([1, 1])), id="outside sp_local_sizes"),
        pytest.param(SimpleNamespace(), id="a version without the method"),
        pytest.param(SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: None), id="None"),
        pytest.param(SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: [2, 2, 2]), id="another topology"),
    ],
)
def test_no_ep_sizes(monkeypatch, metadata):
    monkeypatch.setattr(ops, "get_dp_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(ops, "get_pcp_group", lambda: SimpleNamespace(world_size=2))
    assert ops._get_ep_local_sizes(metadata, SimpleNamespace(world_size=8)) is None


def test_ep_sizes_are_a_list_of_python_ints(monkeypatch):
    metadata = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: list(torch.tensor([2, 1])))
    sizes = ops._get_ep_local_sizes(metadata, SimpleNamespace(world_size=2))
    assert sizes == [2, 1]
    assert [type(size) for size in sizes] == [int, int]
