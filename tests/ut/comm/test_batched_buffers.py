"""The batched strategy on all ranks in one process: what it sends, what it keeps, what it leaves alone."""

import pytest
import torch
from batched_layers import SIZES, inputs, layer, poison, poison_unused

from vllm_ascend_moe.comm.base import ActivationFormat
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.batched_sizes import BatchedSizes
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.errors import InvalidValueError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.fake_group import run_ranks


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scales", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("ranks", [1, 3], ids=lambda ranks: f"R={ranks}")
def test_one_collective_each_way_of_the_bytes_the_formulas_say(ranks, scales, exact):
    capacity, hidden_size = 5, 24

    def body(rank, group):
        layout, placement = TokenLayout.of(SIZES[:ranks], rank), ExpertPlacement.linear(6, ranks)
        given = inputs(layout, dtype=torch.bfloat16, hidden_size=hidden_size)
        if scales:
            given |= {"hidden": torch.ones(layout.local_size, hidden_size, dtype=torch.int8)}
            given |= {"scales": torch.ones(layout.local_size, 2)}
        comm = BatchedAllToAll(group, placement, capacity, exact=exact)
        sent = comm.dispatch(**given)
        comm.combine(torch.zeros(sent.hidden.shape, dtype=torch.bfloat16), sent.handle)
        sizes = BatchedSizes(
            ranks=ranks,
            capacity=capacity,
            num_local=comm.num_local,
            hidden_size=hidden_size,
            top_k=2,
            token_bytes=1 if scales else 2,
            scale_bytes=8 if scales else 0,
            exact=exact,
        )
        assert comm.buffers.nbytes == sizes.cached
        calls = [(call.op, call.shape, call.dtype) for call in group.calls]
        wire = torch.float32 if exact else torch.bfloat16
        assert calls == (
            []
            if ranks == 1
            else [
                ("all_gather", (capacity, sizes.row_bytes), torch.uint8),
                ("all_to_all", (ranks * capacity, hidden_size), wire),
            ]
        )
        assert sizes.sent_back == (ranks - 1) * capacity * hidden_size * wire.itemsize
        assert sizes.sent_out == (ranks - 1) * capacity * sizes.row_bytes

    run_ranks(ranks, body)


def test_layers_share_buffers_and_nothing_old_is_seen():
    """Three layers of two strategies on one cache, poisoned before each; no memory is added after the first step."""

    def body(rank, group):
        cache, placement = BufferCache(), ExpertPlacement.linear(6, 3)
        layers = [BatchedAllToAll(group, placement, 6, buffers=cache) for _ in range(3)]
        kept, memory = [], []
        for sizes in [[3, 1, 4], [0, 6, 0], [0, 0, 0], [1, 0, 2]]:
            given = inputs(TokenLayout.of(sizes, rank))
            wanted = layer(BatchedAllToAll(group, placement, 6), given)
            for comm in layers:
                out = layer(comm, given)
                assert_equal(out, wanted)
                kept.append((out, wanted))
                poison(cache)
            memory.append(cache.nbytes)
        assert set(memory) == {memory[0]}
        for out, wanted in kept:  # results are no buffers
            assert_equal(out, wanted)
        sent = layers[0].dispatch(**given)
        owned = {x.untyped_storage().data_ptr() for x in cache._buffers.values()}
        assert sent.hidden.untyped_storage().data_ptr() in owned
        cache.close()
        with pytest.raises(InvalidValueError, match="closed"):
            layers[1].dispatch(**given)

    run_ranks(3, body)


@pytest.mark.parametrize("ranks", [1, 3], ids=lambda ranks: f"R={ranks}")
def test_inputs_are_not_written_to_and_nothing_shares_memory_with_them(ranks):
    def body(rank, group):
        given = inputs(TokenLayout.of(SIZES[:ranks], rank))
        kept = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
        comm = BatchedAllToAll(group, ExpertPlacement.linear(6, ranks), 4)
        sent = comm.dispatch(**given)
        y = sent.hidden.clone()
        out = comm.combine(y, sent.handle)
        for name, before in kept.items():
            assert_equal(given[name], before)
            assert given[name].untyped_storage().data_ptr() != sent.hidden.untyped_storage().data_ptr()
        assert torch.equal(y.nan_to_num(), sent.hidden.nan_to_num())
        storages = {x.untyped_storage().data_ptr() for x in (*comm.buffers._buffers.values(), y)}
        assert out.untyped_storage().data_ptr() not in storages

    run_ranks(ranks, body)


def test_strided_inputs_and_outputs_give_the_same():
    def body(rank, group):
        given = inputs(TokenLayout.of(SIZES, rank))
        comm = BatchedAllToAll(group, ExpertPlacement.linear(6, 3), 4)
        sent = comm.dispatch(**given)
        wanted = comm.combine(sent.hidden.clone(), sent.handle)
        for name in ("hidden", "topk_weights", "topk_ids"):
            given[name] = given[name].repeat_interleave(2, dim=1)[:, ::2]
        sent = comm.dispatch(**given)
        y = sent.hidden.repeat_interleave(2, dim=2)[..., ::2]
        assert not y.is_contiguous()
        assert_equal(comm.combine(y, sent.handle), wanted)

    run_ranks(3, body)


def test_the_contract():
    def body(rank, group):
        comm = BatchedAllToAll(group, ExpertPlacement.linear(6, 3), 4)
        sent = comm.dispatch(**inputs(TokenLayout.of(SIZES, rank)))
        assert sent.format is comm.format is ActivationFormat.BATCHED
        assert (sent.topk_ids, sent.topk_weights, sent.scales) == (None, None, None)

    run_ranks(3, body)


def test_float64_runs_in_plain_torch():
    def body(rank, group):
        given = inputs(TokenLayout.of(SIZES, rank), dtype=torch.float64)
        comm = BatchedAllToAll(group, ExpertPlacement.linear(6, 3), 4)
        sent = comm.dispatch(**given)
        out = comm.combine(poison_unused(sent.hidden, sent.expert_num_tokens), sent.handle)
        assert out.dtype == torch.float64
        assert_close(out, given["hidden"] * given["topk_weights"].sum(1, keepdim=True), bound=1e-6)

    run_ranks(3, body)
