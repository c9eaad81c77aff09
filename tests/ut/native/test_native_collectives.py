"""Native collectives against the plain torch form, which is their specification, on real processes; their errors."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from native_bodies import PlainGroup, assert_same, compare_forms, gather_after_restart, random_inputs

from vllm_ascend_moe.errors import LayoutError, ShapeError
from vllm_ascend_moe.ops import native
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.testing.launch import launch

pytestmark = pytest.mark.skipif(not native_available(), reason="the native extension is not built")
OPS = torch.ops.ascend_moe


@pytest.fixture(scope="module")
def one_rank():
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield native.TorchGroup(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_same_as_plain_torch_on_gloo(ranks):
    """Uneven and zero token counts, all dtypes, 1-D to 3-D, strided inputs: bit for bit, strides too."""
    assert launch(ranks, compare_forms, ranks, 25, "cpu") == [25] * ranks


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_same_as_plain_torch_on_nccl():
    """The same over NCCL, where native code packs with device kernels and gathers in place."""
    assert launch(2, compare_forms, 7, 60, "cuda", backend="nccl") == [60] * 2


@given(rows=st.integers(0, 9), extra=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_one_rank_property(one_rank, rows, extra, seed):
    """R = 1: any dtypes, shapes and strides; results share no memory with inputs."""
    group, plain, rnd = one_rank, PlainGroup(one_rank), random.Random(seed)
    torch.manual_seed(seed)
    xs, pads = random_inputs(rnd, rows)
    outs = native.packed_all_gather(xs, pads, rows + extra, group)
    for a, b in zip(outs, native.packed_all_gather(xs, pads, rows + extra, plain), strict=True):
        assert_same(a, b)
    outs += [native.padded_all_gather(x, rows + extra, group, v) for x, v in zip(xs, pads, strict=True)]
    outs += [native.padded_reduce_scatter(xs[0].float(), rows, rows, group)]
    storages = {x.untyped_storage().data_ptr() for x in xs if x.numel()}
    assert all(out.untyped_storage().data_ptr() not in storages for out in outs if out.numel())


def test_layout_of_a_packed_row(one_rank):
    """Columns are 16-byte aligned, pad rows are 0 and ids in them -1; a row of each column is contiguous."""
    hidden, weights = torch.ones(1, 6, dtype=torch.bfloat16), torch.full((1, 2), 0.5)
    ids = torch.tensor([[3, 4]], dtype=torch.int32)
    got = native.packed_all_gather([hidden, weights, ids], [0, 0, -1], 2, one_rank)
    assert [x.stride() for x in got] == [(24, 1), (12, 1), (12, 1)]
    assert [x.storage_offset() * x.element_size() for x in got] == [0, 16, 32]
    assert got[0].tolist() == [[1.0] * 6, [0.0] * 6]
    assert got[1].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert got[2].tolist() == [[3, 4], [-1, -1]]


def test_more_rows_than_agreed_is_an_error_not_a_cut(one_rank):
    x = torch.ones(4, 2)
    for gather in (
        lambda: native.padded_all_gather(x, 3, one_rank),
        lambda: native.packed_all_gather([x], [0], 3, one_rank),
        lambda: native.coalesced_all_gather([x], [0], 3, one_rank),
    ):
        with pytest.raises(LayoutError, match=r"x.shape\[0\] = 4, but it must be at most max_local_size = 3"):
            gather()
    name = native.native_group_name(one_rank)
    with pytest.raises(ValueError, match="does not fit max_local_size = 3"):
        OPS.padded_all_gather(x, 3, name, 0.0)


def test_reduce_needs_the_padded_layout(one_rank):
    with pytest.raises(ShapeError, match=r"ep_size \* max_local_size = 1 \* 3 = 3"):
        native.padded_reduce_scatter(torch.ones(4, 2), 3, 2, one_rank)
    name = native.native_group_name(one_rank)
    with pytest.raises(ValueError, match="local_size = 4 is not between 0 and max_local_size = 3"):
        OPS.padded_reduce_scatter(torch.ones(3, 2), 3, 4, name)


def test_packed_tensors_need_the_same_rows(one_rank):
    with pytest.raises(ShapeError, match=r"tensors\[1\].shape\[0\] = 2, but it must be 3"):
        native.packed_all_gather([torch.ones(3, 1), torch.ones(2, 1)], [0, 0], 3, one_rank)
    name = native.native_group_name(one_rank)
    with pytest.raises(ValueError, match="tensors of 3 and 2 rows"):
        OPS.packed_all_gather([torch.ones(3, 1), torch.ones(2, 1)], [0, 0], 3, name)
    with pytest.raises(ValueError, match="one pad value for each"):
        OPS.packed_all_gather([torch.ones(3, 1)], [0, 0], 3, name)


def test_a_name_used_again_finds_the_new_group():
    """Group names repeat after destroy_process_group, so no group may be remembered by its name."""
    before, after, names = launch(1, gather_after_restart)[0]
    assert (before, after) == (1.0, 2.0)
    assert len(set(names)) == 1


def test_a_group_native_code_cannot_find_runs_in_plain_torch(one_rank):
    """A process group made without new_group is not registered under its name."""
    name = native.native_group_name(one_rank)
    native._names.clear()
    torch._C._distributed_c10d._unregister_process_group(name)
    try:
        assert native.native_group_name(one_rank) is None
        assert native.padded_all_gather(torch.ones(1, 2), 2, one_rank).tolist() == [[1, 1], [0, 0]]
    finally:
        torch._C._distributed_c10d._register_process_group(name, dist.group.WORLD)
        native._names.clear()


@pytest.mark.parametrize("rows", [3, 5])
def test_opcheck(one_rank, rows):
    """Schemas, aliasing, shape-only implementations and tracing with symbolic sizes."""
    name = native.native_group_name(one_rank)
    x, weights = torch.randn(3, 8), torch.rand(3, 2)
    ids = torch.randint(0, 4, (3, 2), dtype=torch.int32)
    check = torch.library.opcheck
    check(OPS.padded_all_gather.default, (x, rows, name, 0.0))
    check(OPS.coalesced_all_gather.default, ([x, weights, ids], [0, 0, -1], rows, name))
    check(OPS.packed_all_gather.default, ([x, weights, ids], [0, 0, -1], rows, name))
    check(OPS.padded_reduce_scatter.default, (torch.randn(rows, 8), rows, 2, name))


def test_packed_gather_compiles(one_rank):
    """Under torch.compile the views become ordinary views: same values, one graph."""

    def gather(x, ids):
        hidden, out_ids = native.packed_all_gather([x, ids], [0, -1], 4, one_rank)
        return hidden * 2, out_ids + 1

    x, ids = torch.randn(3, 8), torch.randint(0, 4, (3, 2))
    compiled = torch.compile(gather, backend="aot_eager", fullgraph=False)
    for got, want in zip(compiled(x, ids), gather(x, ids), strict=True):
        assert torch.equal(got, want)
