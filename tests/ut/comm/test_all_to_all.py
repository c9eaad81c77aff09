"""All-to-all by row on all ranks in one process: which rows cross, bytes, dtypes, placement.

Proves, against a token-by-token description of what must arrive, and against the dense answer: that each token crosses
to a rank once and to no other rank, in order, byte for byte; that placement, replicas, ids and NaN are handled. Splits
on which two ranks disagree the fake group refuses. Errors are in test_all_to_all_errors.py, real backends in
test_all_to_all_mp.py.
"""

import pytest
import rows_cases
import strategy_cases
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows_layers import inputs, linear
from strategy_cases import Case

from vllm_ascend_moe.comm import batched_rows, row_plan
from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops import row_bytes
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_equal
from vllm_ascend_moe.testing.data import Routing
from vllm_ascend_moe.testing.fake_group import run_ranks


@pytest.mark.parametrize("name", rows_cases.CASES)
@pytest.mark.parametrize("ranks", [1, 2, 5], ids=lambda ranks: f"R={ranks}")
def test_rows_arrive_as_described_and_layers_give_the_dense_answer(name, ranks):
    case = rows_cases.on(rows_cases.CASES[name], ranks)
    placement = rows_cases.placement_of(case, ranks)
    run_ranks(ranks, lambda rank, group: rows_cases.run_case(AllToAll(group, placement), case, rank, ranks))


@given(st.data())
def test_any_sizes_placement_and_routing(drawn):
    """Experts may live in any number on any rank, or on none."""
    ranks = drawn.draw(st.integers(1, 5), label="R")
    owners = drawn.draw(st.lists(st.integers(-1, ranks - 1), min_size=1, max_size=9), label="rank of each expert")
    placement = ExpertPlacement.of(owners, ranks)
    sizes = drawn.draw(st.lists(st.integers(0, 7), min_size=ranks, max_size=ranks), label="T_r")
    case = Case(
        lambda _: sizes,
        num_experts=len(owners),
        top_k=drawn.draw(st.integers(1, len(owners)), label="K"),
        routing=drawn.draw(st.sampled_from(Routing), label="routing"),
        invalid_share=drawn.draw(st.sampled_from([0.0, 0.4]), label="invalid share"),
        dtype=drawn.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), label="dtype"),
        id_dtype=drawn.draw(st.sampled_from([torch.int32, torch.int64]), label="id dtype"),
    )

    def body(rank, group):
        comm = AllToAll(group, placement)
        sent = rows_cases.dispatch(comm, case, strategy_cases.make_tokens(case, rank, ranks))
        wanted = rows_cases.expected_rows(case, placement, rank)
        assert_equal(sent.hidden, wanted.hidden, what="hidden")
        assert_equal(sent.topk_ids, wanted.topk_ids, what="ids")
        # Identity experts: each row comes back multiplied by how many of its experts live here.
        out = comm.combine(sent.hidden * (sent.topk_ids >= 0).sum(1, keepdim=True), sent.handle)
        tokens = strategy_cases.make_tokens(case, rank, ranks)
        routed = torch.tensor([*[owner >= 0 for owner in owners], False])
        ids = torch.where((tokens.ids >= 0) & (tokens.ids < len(owners)), tokens.ids.long(), len(owners))
        torch.testing.assert_close(out, tokens.hidden * routed[ids].sum(1, keepdim=True))

    run_ranks(ranks, body)


# -- what crosses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "id_dtype"), [(6, torch.int32), (8, torch.int64), (4, torch.int32)], ids=str)
def test_the_bytes_that_cross_are_those_of_the_rows_and_no_more(top_k, id_dtype):
    """No pad row, no unused byte at sizes real models have (a row is a multiple of 16 bytes)."""
    case = Case(strategy_cases.uneven, num_experts=9, top_k=top_k, dtype=torch.bfloat16, id_dtype=id_dtype)
    ranks = 4
    placement = ExpertPlacement.linear(9, ranks)

    def body(rank, group):
        comm = AllToAll(group, placement)
        sent = rows_cases.dispatch(comm, case, strategy_cases.make_tokens(case, rank, ranks))
        comm.combine(sent.hidden, sent.handle)
        return rank, group.calls, sent.hidden.shape[0]

    for rank, calls, received in run_ranks(ranks, body):
        owners = [{placement.ranks[e] for e in row} for row in strategy_cases.make_tokens(case, rank, ranks).ids]
        pairs = sum(map(len, owners))
        assert len(calls) == 3
        assert {call.op for call in calls} == {"all_to_all"}
        counts, rows, back = ((*call.shape, call.dtype) for call in calls)
        assert counts == (ranks, torch.int64)
        payload = strategy_cases.H * 2 + top_k * (4 + id_dtype.itemsize)
        assert rows == (pairs, payload, torch.uint8), "each (token, rank) pair once"
        assert back == (received, strategy_cases.H * 2, torch.uint8), "each partial sum once, in its own dtype"


def test_odd_sizes_cost_less_than_16_bytes_a_row():
    def body(rank, group):
        given = inputs(TokenLayout.of([3, 2], rank), top_k=3, dtype=torch.bfloat16, hidden_size=7)
        sent = linear(group).dispatch(**given)
        return sent.hidden, group.calls[1].shape[1] - (7 * 2 + 3 * 8)

    for hidden, unused in run_ranks(2, body):
        assert 0 <= unused < 16
        assert hidden.data_ptr() % 16 == hidden.stride(0) * 2 % 16 == 0, "rows are aligned for vector loads"


@pytest.mark.parametrize("plain", [False, True], ids=["native", "plain torch"])
def test_one_host_synchronisation(plain, monkeypatch):
    """Counted as reads of a tensor by the host; on a device, where plain torch runs, each would wait for it."""
    reads = []
    if plain:
        monkeypatch.setattr(row_plan, "form_on", lambda device_type: "torch")
        monkeypatch.setattr(row_bytes, "native_available", lambda: False)
        monkeypatch.setattr(batched_rows, "form_on", lambda device_type: "torch")
    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, name=name, original=original):
            reads.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)

    class Alone:
        """A group of one, without the fake group's own reads."""

        world_size, rank_in_group = 1, 0

        def all_to_all(self, x, output_splits=None, input_splits=None):
            return x.clone()

    comm = linear(Alone())
    given = inputs(TokenLayout.of([5], 0))
    sent = comm.dispatch(**given)
    out = comm.combine(sent.hidden, sent.handle)
    assert reads == ["tolist"]
    assert_equal(out, given["hidden"])


@pytest.mark.parametrize(
    "hidden_dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str
)
@pytest.mark.parametrize("scale_shape", [(), (1,), (3,)], ids=["(n,)", "(n, 1)", "(n, groups)"])
def test_scales_of_a_quantised_payload_stay_with_their_rows(hidden_dtype, scale_shape):
    sizes = [1, 3]

    def body(rank, group):
        layout = TokenLayout.of(sizes, rank)
        tokens = data.token_ids(layout, rank)
        given = inputs(layout)
        given["hidden"] = (tokens[:, None] + torch.tensor([1, 2, 3, 4])).to(hidden_dtype)
        scales = ((tokens + 1) / 64).view(-1, *[1] * len(scale_shape)).expand(-1, *scale_shape)
        given["topk_ids"] = torch.tensor([[0, 3]] * layout.local_size, dtype=torch.int32).view(-1, 2)
        sent = linear(group).dispatch(**given, scales=scales)
        assert sent.hidden.dtype == hidden_dtype
        assert sent.scales.dtype == torch.float32
        assert sent.scales.shape == (4, *scale_shape)
        for token in range(4):
            assert sent.hidden[token].float().tolist() == [token + 1, token + 2, token + 3, token + 4]
            assert sent.scales[token].flatten().unique().tolist() == [(token + 1) / 64]

    run_ranks(2, body)


def test_router_weights_travel_as_fp32_whatever_they_are():
    def body(rank, group):
        given = inputs(TokenLayout.of([3, 1], rank))
        given["topk_weights"] = given["topk_weights"].bfloat16()
        sent = linear(group).dispatch(**given)
        assert sent.topk_weights.dtype == torch.float32
        return sent.topk_weights

    assert torch.cat(run_ranks(2, body)).shape[0] > 0


# -- sums ------------------------------------------------------------------------------------------------------


def test_partial_sums_are_added_in_fp32_and_rank_order():
    """1 + 2^-8 + 2^-8 in bf16 is 1 where each step is rounded, and 1.0078125 where the sum is."""

    def body(rank, group):
        layout = TokenLayout.of([1, 0, 0], rank)
        given = inputs(layout, top_k=3, num_experts=3, dtype=torch.bfloat16)
        given["topk_ids"] = torch.tensor([[2, 0, 1]], dtype=torch.int32)[: layout.local_size]
        comm = linear(group, 3)
        sent = comm.dispatch(**given)
        part = torch.full((1, 4), [1.0, 2**-8, 2**-8][rank], dtype=torch.bfloat16)
        wide = torch.full((1, 4), [1e8, -1e8, 1.0][rank])
        return comm.combine(part, sent.handle), comm.combine(wide, sent.handle)

    narrow, wide = run_ranks(3, body)[0]
    assert_equal(narrow, torch.full((1, 4), 1.0078125, dtype=torch.bfloat16))
    assert_equal(wide, torch.ones(1, 4))  # 0 in any other order of ranks


def test_nothing_of_rows_that_were_not_sent_reaches_a_token():
    """NaN in an unrouted token's hidden state and weights; one token of rank 0 routed, one not."""

    def body(rank, group):
        layout = TokenLayout.of([2, 1], rank)
        given = inputs(layout)
        given["topk_ids"] = torch.tensor([[-1, 0], [-1, -1]] if rank == 0 else [[4, -9]], dtype=torch.int32)
        given["hidden"][-1] = float("nan")
        given["topk_weights"][-1] = float("nan")
        comm = linear(group)
        sent = comm.dispatch(**given)
        assert not sent.hidden.isnan().any()
        return comm.combine(sent.hidden, sent.handle), given["hidden"]

    (out, hidden), (idle, _) = run_ranks(2, body)
    assert_equal(out, torch.stack((hidden[0], torch.zeros(4))))
    assert_equal(idle, torch.zeros(1, 4))


LOGICAL = torch.tensor([0, 1, 2, 3, 0, 3])  # of each physical expert: 4 experts, 2 redundant
PLACES = {
    "replicas apart": ExpertPlacement.of([0, 0, 0, 1, 1, 1], 2),
    "replicas swapped": ExpertPlacement.of([1, 0, 1, 0, 0, 1], 2),
    "other slots": ExpertPlacement.of([0, 0, 0, 1, 1, 1], 2, slots=[2, 0, 1, 1, 2, 0]),
    "all on one rank": ExpertPlacement.of([1] * 6, 2),
}


def layer_with_replicas(placement):
    """Integers throughout, so that sums are exact in any order. Experts multiply by their logical id + 1."""
    physical = torch.tensor([[0, 3], [4, 5], [1, 4], [2, 3], [5, 0]], dtype=torch.int32)

    def body(rank, group):
        layout = TokenLayout.of([3, 2], rank)
        mine = slice(*((0, 3), (3, 5))[rank])
        comm = AllToAll(group, placement)
        sent = comm.dispatch(
            torch.arange(20.0).view(5, 4)[mine],
            torch.arange(1.0, 11).view(5, 2)[mine],
            physical[mine],
            num_experts=6,
            layout=layout,
        )
        # By slot, as weights are: what an expert computes must come from where its slot says.
        by_slot = LOGICAL[placement.experts_of(rank)] + 1 if placement.local_counts[rank] else torch.zeros(1)
        slots = placement.expert_map(rank)[sent.topk_ids.clamp(min=0).long()]
        assert ((sent.topk_ids < 0) | (slots >= 0)).all()
        factor = torch.where(sent.topk_ids >= 0, by_slot[slots.clamp(min=0).long()] * sent.topk_weights, 0.0)
        return comm.combine(sent.hidden * factor.sum(1, keepdim=True), sent.handle)

    return torch.cat(run_ranks(2, body))


@pytest.mark.parametrize("name", PLACES)
def test_moving_a_replica_changes_nothing(name):
    weights = torch.arange(1.0, 11).view(5, 2)
    logical = torch.tensor([[0, 3], [0, 3], [1, 0], [2, 3], [3, 0]])
    dense = torch.arange(20.0).view(5, 4) * ((logical + 1) * weights).sum(1, keepdim=True)
    assert_equal(layer_with_replicas(PLACES[name]), dense)


# -- contract --------------------------------------------------------------------------------------------------


def test_no_state_between_dispatch_and_combine():
    """Two dispatches of different layouts in flight on one object; each handle brings back its own tokens."""

    def body(rank, group):
        comm = linear(group)
        layouts = [TokenLayout.of(sizes, rank) for sizes in ([3, 1], [0, 4])]
        before = dict(vars(comm))
        sent = [comm.dispatch(**inputs(layout, top_k=1)) for layout in layouts]
        assert vars(comm) == before
        for layout, dispatched in reversed(list(zip(layouts, sent, strict=True))):
            assert_equal(comm.combine(dispatched.hidden, dispatched.handle), inputs(layout)["hidden"])

    run_ranks(2, body)


@pytest.mark.parametrize("sizes", [[3], [2, 2]], ids=str)
def test_nothing_dispatched_or_combined_shares_memory_with_an_input(sizes):
    def body(rank, group):
        given, comm = inputs(TokenLayout.of(sizes, rank)), linear(group)
        sent = comm.dispatch(**given)
        y = sent.hidden.contiguous().clone()
        out = comm.combine(y, sent.handle)
        mine = (given["hidden"], given["topk_weights"], given["topk_ids"], y)
        storage = {tensor.untyped_storage().data_ptr() for tensor in mine}
        for tensor in (sent.hidden, sent.topk_weights, sent.topk_ids, out):
            assert tensor.untyped_storage().data_ptr() not in storage

    run_ranks(len(sizes), body)


def test_strided_inputs_and_outputs():
    def body(rank, group):
        given, comm = inputs(TokenLayout.of([2, 2], rank), top_k=1), linear(group)
        for name in ("hidden", "topk_weights", "topk_ids"):
            given[name] = given[name].repeat_interleave(2, dim=1)[:, ::2]
        sent = comm.dispatch(**given)
        wide = sent.hidden.repeat_interleave(2, dim=1)[:, ::2]
        assert_equal(comm.combine(wide, sent.handle), given["hidden"].contiguous())

    run_ranks(2, body)
