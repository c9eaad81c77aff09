"""The batched strategy on all ranks in one process: contract, order, buffers, capacity, errors.

Proves where every row goes, that unwritten slots and old rows reach no token, what is sent and kept, that nothing is
kept but buffers, and each error; in native code and in plain torch. Real processes with all strategies are in
test_all_strategies.py, those with fast experts in test_batched_processes.py, graphs in tests/e2e/cuda.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_moe.comm import batched_rows
from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.base import ActivationFormat
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.batched_sizes import BatchedSizes
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.errors import CapacityError, CommError, ConfigError, InvalidValueError, PlacementError, ShapeError
from vllm_ascend_moe.experts import reference
from vllm_ascend_moe.experts.reference import ReferenceExperts, expert_mlp
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.fake_group import run_ranks

NAN = float("nan")
FORMS = [
    pytest.param("native", marks=pytest.mark.skipif(not native_available(), reason="the extension is not built")),
    "torch",
]


@pytest.fixture
def form(request, monkeypatch):
    monkeypatch.setattr(batched_rows, "form_on", lambda device_type: request.param)
    return request.param


both_forms = pytest.mark.parametrize("form", FORMS, indirect=True)


@dataclass(frozen=True)
class Setting:
    """One layer: sizes, where experts live, and every token's choices (rank after rank)."""

    sizes: list[int]
    ranks_of_experts: list[int]
    top_k: int
    ids: list[list[int]]
    slack: int

    @property
    def placement(self):
        return ExpertPlacement.of(self.ranks_of_experts, len(self.sizes))

    @property
    def capacity(self):
        return max(1, max(self.sizes) + self.slack)


@st.composite
def settings_of_a_layer(draw):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    experts = draw(st.integers(1, 6))
    choices = st.sampled_from([*range(experts), -1, -9, experts, experts + 50])
    top_k = draw(st.integers(1, 4))
    return Setting(
        sizes,
        draw(st.lists(st.integers(-1, len(sizes) - 1), min_size=experts, max_size=experts)),
        top_k,
        # Choices repeat, and are -1, far below, E and far above.
        draw(st.lists(st.lists(choices, min_size=top_k, max_size=top_k), min_size=sum(sizes), max_size=sum(sizes))),
        draw(st.integers(0, 3)),
    )


def poison(buffers):
    for buffer in buffers._buffers.values():
        buffer.fill_(NAN if buffer.is_floating_point() else 77)


def poison_unused(x, counts):
    unused = torch.arange(x.shape[1]) >= counts[:, None]
    return x.masked_fill(unused[..., None], NAN)


def check_markers(rank, group, setting, id_dtype, exact):
    """Rows that hold their token's number: who gets which, in which order, and what comes back."""
    layout, placement = TokenLayout.of(setting.sizes, rank), setting.placement
    tokens = data.token_ids(layout, rank)
    all_ids = torch.tensor(setting.ids, dtype=id_dtype).view(sum(setting.sizes), setting.top_k)
    experts = placement.num_experts
    ids, weights = all_ids[tokens], 2.0 ** -torch.arange(setting.top_k).expand(len(tokens), -1)
    valid = (ids >= 0) & (ids < experts)
    comm = BatchedAllToAll(group, placement, setting.capacity, exact=exact)
    hidden = (tokens + 1)[:, None].expand(-1, 3).float()
    # One scale a token, or as many as it has elements: then both have the shape and dtype of one buffer.
    scales = hidden if exact else hidden[:, 0]
    for _ in range(2):
        sent = comm.dispatch(
            hidden.masked_fill(~valid.any(1, keepdim=True), NAN),
            weights.masked_fill(~valid, NAN),
            ids,
            num_experts=experts,
            layout=layout,
            scales=scales,
        )
        local = placement.experts_of(rank)
        rows = setting.capacity * len(setting.sizes)
        assert sent.hidden.shape == (len(local), rows, 3)
        assert sent.scales.shape == (len(local), rows, *scales.shape[1:])
        assert sent.scales.data_ptr() != sent.hidden.data_ptr() or not local
        assert sent.expert_num_tokens.shape == (len(local),)
        assert sent.expert_num_tokens.dtype == torch.int32
        for slot, expert in enumerate(local):
            # Tokens are numbered by source rank, then by token: the order experts see them in.
            wanted = [token + 1 for token, chosen in enumerate(all_ids.tolist()) if expert in chosen]
            assert sent.expert_num_tokens[slot] == len(wanted)
            assert sent.hidden[slot, : len(wanted), 0].tolist() == wanted
            assert sent.scales[slot, : len(wanted)].flatten().unique().tolist() == wanted
        gains = torch.tensor(local, dtype=torch.float32)[:, None, None] + 1
        y = poison_unused(sent.hidden * gains, sent.expert_num_tokens)
        out = comm.combine(y, sent.handle)
        share = torch.zeros(len(tokens))
        for expert, owner in enumerate(setting.ranks_of_experts):
            if owner >= 0:
                share += (weights * (ids == expert)).sum(1) * (expert + 1)
        assert_equal(out, hidden * share[:, None])  # powers of two and small integers: exact in any order
        poison(comm.buffers)


@pytest.mark.parametrize("form", FORMS)
def test_every_expert_gets_its_tokens_in_order_and_they_come_back(form, monkeypatch):
    monkeypatch.setattr(batched_rows, "form_on", lambda device_type: form)

    @settings(max_examples=60)
    @given(setting=settings_of_a_layer(), id_dtype=st.sampled_from([torch.int32, torch.int64]), exact=st.booleans())
    def check(setting, id_dtype, exact):
        run_ranks(len(setting.sizes), lambda rank, group: check_markers(rank, group, setting, id_dtype, exact))

    check()


@given(setting=settings_of_a_layer(), rank=st.integers(0, 3))
@pytest.mark.skipif(not native_available(), reason="the extension is not built")
def test_native_and_plain_torch_plan_the_same_slots(setting, rank):
    placement = setting.placement
    mine = placement.expert_map(rank % placement.ep_size)
    local = placement.local_counts[rank % placement.ep_size]
    ids = torch.tensor(setting.ids or [[-1]])
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        for form in ("native", "torch"):
            patch.setattr(batched_rows, "form_on", lambda device_type, form=form: form)
            plans.append(batched_rows.plan_slots(ids, batched_rows.slot_table(mine, local), local))
    for native, plain in zip(*plans, strict=True):
        assert_equal(native, plain)
        assert native.is_contiguous()
        assert plain.is_contiguous()


SIZES = [3, 1, 4]


def inputs(layout, num_experts=6, top_k=2, dtype=torch.float32, hidden_size=4):
    tokens = data.token_ids(layout, layout.rank)
    return {
        "hidden": data.hidden_states(0, tokens, hidden_size, dtype),
        "topk_weights": data.topk_weights(0, tokens, top_k),
        "topk_ids": data.topk_ids(0, tokens, top_k, num_experts),
        "num_experts": num_experts,
        "layout": layout,
    }


def layer(comm, given):
    """Dispatch, reference experts with NaN in what they do not write, combine."""
    rank = comm.group.rank_in_group
    weights = data.expert_weights(0, comm.placement.experts_of(rank), given["hidden"].shape[1], 8)
    sent = comm.dispatch(**given)
    hidden = poison_unused(sent.hidden, sent.expert_num_tokens)
    y = ReferenceExperts().apply_batched(hidden, sent.expert_num_tokens, weights)
    return comm.combine(y, sent.handle)


def row_by_row(x, weights, expert, activation):
    return torch.cat([x[:0], *(expert_mlp(row, weights, expert, activation) for row in x.split(1))])


@both_forms
@pytest.mark.parametrize("seed", range(3))
def test_exact_gives_the_bits_of_all_to_all_by_row_on_the_reference_experts(form, seed, monkeypatch):
    """fp32; a token that names an expert twice too: its two products are added one after the other by both.

    Such a token is two rows to one format and one to the other, and how many rows a matrix product has may decide how
    it rounds (MKL without AVX-512): so experts take each row alone."""
    monkeypatch.setattr(reference, "expert_mlp", row_by_row)

    def body(rank, group):
        placement = ExpertPlacement.round_robin(7, 3)
        layout = TokenLayout.of(SIZES, rank)
        given = inputs(layout, num_experts=7, top_k=5, hidden_size=16)
        tokens = data.token_ids(layout, rank)
        given["topk_ids"] = data.topk_ids(seed, tokens, 5, 7, invalid_share=0.2)
        given["topk_ids"][:, 4] = given["topk_ids"][:, 0]
        batched = layer(BatchedAllToAll(group, placement, 5, exact=True), given)
        rows = AllToAll(group, placement, exact=True)
        sent = rows.dispatch(**given)
        y = ReferenceExperts().apply(
            sent.hidden,
            sent.topk_weights,
            sent.topk_ids,
            data.expert_weights(0, placement.experts_of(rank), 16, 8),
            expert_map=placement.expert_map(rank),
        )
        assert_equal(batched, rows.combine(y, sent.handle))

    run_ranks(3, body)


@both_forms
def test_without_exact_16_bit_sums_are_rounded_once_a_rank_and_once_at_home(form):
    """bf16: each rank sends its fp32 sum rounded to bf16; the sum of those in fp32 is rounded once."""

    def body(rank, group):
        layout = TokenLayout.of([1, 1, 1], rank)
        placement = ExpertPlacement.linear(6, 3)
        given = inputs(layout, top_k=6, dtype=torch.bfloat16) | {"topk_ids": torch.arange(6, dtype=torch.int32)[None]}
        results = []
        for exact in (False, True):
            comm = BatchedAllToAll(group, placement, 1, exact=exact)
            sent = comm.dispatch(**given)
            gains = torch.tensor(placement.experts_of(rank))[:, None, None] + 1
            results.append(comm.combine((sent.hidden * gains).bfloat16(), sent.handle))
        w, x = given["topk_weights"], given["hidden"]
        products = [(x * (e + 1)).bfloat16().float() * w[:, e : e + 1] for e in range(6)]
        partial = [products[i] + products[i + 1] for i in (0, 2, 4)]
        assert_equal(results[0], sum(p.bfloat16().float() for p in partial).bfloat16())
        assert_equal(results[1], sum(partial).bfloat16())

    run_ranks(3, body)


# -- what is sent and kept -------------------------------------------------------------------------------------


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


# -- capacity and agreement ------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", range(3), ids=lambda rank: f"rank {rank} has too many")
def test_more_tokens_than_capacity_is_an_error_on_every_rank_before_anything_is_sent(over):
    sizes = [2, 2, 2]
    sizes[over] = 5

    def body(rank, group):
        placement, given = ExpertPlacement.linear(6, 3), inputs(TokenLayout.of(sizes, rank))
        layer(BatchedAllToAll(group, placement, 5), given)  # exactly C passes
        before = len(group.calls)
        with pytest.raises(CapacityError, match=r"layout.max_local_size = 5, but .* 4 tokens a rank"):
            BatchedAllToAll(group, placement, 4).dispatch(**given)
        return len(group.calls) - before

    assert run_ranks(3, body) == [0, 0, 0]


def agreement(make):
    """What check_capacity_agrees raises by rank, and how many collectives it costs."""

    def body(rank, group):
        try:
            make(rank, group).check_capacity_agrees()
        except InvalidValueError as error:
            return type(error), str(error), len(group.calls)
        return None, "", len(group.calls)

    return run_ranks(3, body)


def test_ranks_that_agree_pass_with_one_collective():
    found = agreement(lambda rank, group: BatchedAllToAll(group, ExpertPlacement.linear(6, 3), 4))
    assert found == [(None, "", 1)] * 3


def test_different_capacities_are_named_on_every_rank():
    found = agreement(lambda rank, group: BatchedAllToAll(group, ExpertPlacement.linear(6, 3), 4 + (rank == 1)))
    for kind, message, calls in found:
        assert (kind, calls) == (CapacityError, 1)
        assert "[4, 5, 4]" in message


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("placement", lambda rank, group: BatchedAllToAll(group, ExpertPlacement.of([0, 1, rank % 2], 3), 4)),
        ("exact", lambda rank, group: BatchedAllToAll(group, ExpertPlacement.linear(6, 3), 4, exact=rank == 2)),
    ],
)
def test_other_differences_are_named_on_every_rank(name, make):
    for kind, message, _ in agreement(make):
        assert kind is ConfigError
        assert name + " by rank" in message


# -- errors ----------------------------------------------------------------------------------------------------


def alone(**changes):
    """One rank, one dispatch and combine with something changed."""

    def body(rank, group):
        comm = BatchedAllToAll(group, ExpertPlacement.linear(6, 1), changes.pop("capacity", 3))
        y = changes.pop("expert_output", None)
        sent = comm.dispatch(**(inputs(TokenLayout.of([3], 0)) | changes))
        comm.combine(torch.zeros(6, 3, 4) if y is None else y, changes.pop("handle", sent.handle))

    return run_ranks(1, body)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused(capacity):
    with pytest.raises(CapacityError, match="1 or more"):
        alone(capacity=capacity)


def test_a_placement_of_other_ranks_or_experts_is_refused():
    with pytest.raises(PlacementError, match="ep_size"):
        run_ranks(2, lambda rank, group: BatchedAllToAll(group, ExpertPlacement.linear(6, 3), 4))
    with pytest.raises(PlacementError, match="num_experts"):
        alone(num_experts=7)


@pytest.mark.parametrize("shape", [(6, 3), (6, 4, 4), (5, 3, 4), (18, 4)], ids=str)
def test_outputs_of_another_shape_are_refused(shape):
    with pytest.raises(ShapeError, match=r"\[E_l = 6, C\*R = 3, H\]"):
        alone(expert_output=torch.zeros(shape))


def test_a_handle_of_another_strategy_is_refused():
    def body(rank, group):
        BatchedAllToAll(group, ExpertPlacement.linear(6, 1), 4).combine(torch.zeros(6, 4, 4), object())

    with pytest.raises(ShapeError, match="handle"):
        run_ranks(1, body)


def test_a_backend_that_fails_is_named_with_the_step():
    def body(rank, group):
        comm = BatchedAllToAll(group, ExpertPlacement.linear(6, 2), 4)
        given = inputs(TokenLayout.of([3, 1], rank))
        sent = comm.dispatch(**given)

        def fail(*args):
            raise RuntimeError("Connection closed by peer")

        group.all_gather = group.all_to_all = fail
        with pytest.raises(CommError, match=r"dispatch.*Connection closed"):
            comm.dispatch(**given)
        with pytest.raises(CommError, match=r"combine.*Connection closed"):
            comm.combine(sent.hidden, sent.handle)

    run_ranks(2, body)


def test_every_way_to_count_is_used():
    """Of 200 drawn routings: experts named twice, with no token, and by all tokens occur (for the property test)."""
    seen = Counter()

    @settings(max_examples=200, database=None)
    @given(setting=settings_of_a_layer())
    def look(setting):
        chosen = [set(ids) for ids in setting.ids]
        seen["twice"] += any(len(set(ids)) < len(ids) for ids in setting.ids)
        for expert, rank in enumerate(setting.ranks_of_experts):
            takers = sum(expert in ids for ids in chosen)
            seen["none"] += takers == 0
            seen["all"] += bool(chosen) and takers == len(chosen)
            seen["nowhere"] += rank < 0 and takers > 0
        seen["no local expert"] += any(count == 0 for count in setting.placement.local_counts)

    look()
    assert all(seen[name] > 10 for name in ("twice", "none", "all", "nowhere", "no local expert")), seen
