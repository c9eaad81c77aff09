"""The padded all-gather strategy on all ranks in one process: contract, collectives, errors.

Proves, with one packed gather and with one gather a tensor, rows, pad ids, dtypes, what reaches collectives, that
nothing is kept between dispatch and combine, and each error. The values on real processes are in test_mp_padded.py.
"""

import dataclasses

import pytest
import strategy_cases
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.comm.base import ActivationFormat
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.errors import DtypeError, InvalidValueError, LayoutError, ShapeError
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.fake_group import run_ranks

PACKED = pytest.mark.parametrize("packed_bytes", [0, 1 << 20], ids=["one by one", "packed"])


def inputs(layout, top_k=2, num_experts=4, dtype=torch.float32):
    tokens = data.token_ids(layout, layout.rank)
    return {
        "hidden": data.hidden_states(0, tokens, 4, dtype),
        "topk_weights": data.topk_weights(0, tokens, top_k),
        "topk_ids": data.topk_ids(0, tokens, top_k, num_experts),
        "num_experts": num_experts,
        "layout": layout,
    }


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), packed_bytes=st.sampled_from([0, 200, 1 << 20]))
def test_marked_rows_go_where_the_layout_says_and_come_back(sizes, packed_bytes):
    """200 bytes are packed for one or two rows and not for more: the same choice on every rank."""

    def body(rank, group):
        strategy_cases.run_markers(PaddedAllGather(group, packed_bytes), sizes, rank)

    run_ranks(len(sizes), body)


@PACKED
@pytest.mark.parametrize("name", strategy_cases.CASES)
@pytest.mark.parametrize("ranks", [1, 2, 5], ids=lambda ranks: f"R={ranks}")
def test_whole_layers_give_the_dense_answer(name, ranks, packed_bytes):
    case = strategy_cases.CASES[name]
    if ranks == 1:
        case = dataclasses.replace(case, sizes=lambda _: [6])
    run_ranks(
        ranks, lambda rank, group: strategy_cases.run_case(PaddedAllGather(group, packed_bytes), case, rank, ranks)
    )


@PACKED
@pytest.mark.parametrize("scale_shape", [(), (1,), (2,)], ids=["(n,)", "(n, 1)", "(n, groups)"])
def test_scales_of_a_quantised_payload_stay_with_their_rows(scale_shape, packed_bytes):
    """int8 rows with fp32 scales: after the gather each row still has its own; 1-D stays 1-D."""
    sizes = [1, 3]

    def body(rank, group):
        layout = TokenLayout.of(sizes, rank)
        given = inputs(layout)
        tokens = data.token_ids(layout, rank)
        given["hidden"] = (tokens[:, None] + torch.tensor([1, 2, 3, 4])).to(torch.int8)
        scales = ((tokens + 1) / 64).view(-1, *[1] * len(scale_shape)).expand(-1, *scale_shape)
        sent = PaddedAllGather(group, packed_bytes).dispatch(**given, scales=scales)
        assert sent.hidden.dtype == torch.int8
        assert sent.scales.dtype == torch.float32
        assert sent.scales.shape == (6, *scale_shape)
        for other in range(2):
            for row, token in zip(layout.rows_of(other), data.token_ids(layout, other).tolist(), strict=True):
                assert sent.hidden[row].tolist() == [token + 1, token + 2, token + 3, token + 4]
                assert sent.scales[row].flatten().unique().tolist() == [(token + 1) / 64]

    run_ranks(2, body)


@PACKED
def test_the_reduction_happens_once_with_weights_that_sum_to_one(packed_bytes):
    """Identity experts: one token per rank, two experts on two ranks; the output is the input."""

    def body(rank, group):
        layout = TokenLayout.of([1, 1], rank)
        given = inputs(layout) | {"topk_ids": torch.tensor([[0, 1]], dtype=torch.int32), "num_experts": 2}
        given["topk_weights"] = torch.tensor([[0.25, 0.75]])
        comm = PaddedAllGather(group, packed_bytes)
        sent = comm.dispatch(**given)
        share = (sent.topk_weights * (sent.topk_ids == rank)).sum(1, keepdim=True)
        assert_close(comm.combine(sent.hidden * share, sent.handle), given["hidden"])
        return [call.op for call in group.calls]

    for calls in run_ranks(2, body):
        assert calls == ["all_gather"] * (1 if packed_bytes else 3) + ["reduce_scatter"]


@PACKED
def test_no_state_between_dispatch_and_combine(packed_bytes):
    """Two dispatches of different layouts in flight on one object; each handle brings back its own tokens."""

    def body(rank, group):
        comm = PaddedAllGather(group, packed_bytes)
        layouts = [TokenLayout.of(sizes, rank) for sizes in ([3, 1], [0, 4])]
        before = dict(vars(comm))
        sent = [comm.dispatch(**inputs(layout)) for layout in layouts]
        assert vars(comm) == before
        for layout, dispatched in reversed(list(zip(layouts, sent, strict=True))):
            out = comm.combine(dispatched.hidden * (rank == 0), dispatched.handle)
            assert_equal(out, inputs(layout)["hidden"])

    run_ranks(2, body)


def test_what_is_dispatched_is_frozen_keyword_only_and_in_the_rows_format():
    sent = run_ranks(1, lambda rank, group: PaddedAllGather(group).dispatch(**inputs(TokenLayout.of([2], 0))))[0]
    assert sent.format is PaddedAllGather.format is ActivationFormat.ROWS
    assert sent.expert_num_tokens is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        sent.hidden = None
    with pytest.raises(TypeError):
        type(sent)(ActivationFormat.ROWS, sent.hidden)


@PACKED
@pytest.mark.parametrize("sizes", [[3], [2, 2], [1, 3]], ids=str)
def test_nothing_dispatched_or_combined_shares_memory_with_an_input(sizes, packed_bytes):
    def body(rank, group):
        given = inputs(TokenLayout.of(sizes, rank))
        comm = PaddedAllGather(group, packed_bytes)
        sent = comm.dispatch(**given)
        out = comm.combine(sent.hidden, sent.handle)
        storage = {
            tensor.untyped_storage().data_ptr()
            for tensor in (given["hidden"], given["topk_weights"], given["topk_ids"])
        }
        for tensor in (sent.hidden, sent.topk_weights, sent.topk_ids):
            assert tensor.untyped_storage().data_ptr() not in storage
        assert out.untyped_storage().data_ptr() != sent.hidden.untyped_storage().data_ptr()

    run_ranks(len(sizes), body)


@PACKED
def test_strided_inputs_reach_collectives_contiguous(packed_bytes):
    """The fake group refuses strided inputs."""

    def body(rank, group):
        given = inputs(TokenLayout.of([2, 2], rank))
        plain = PaddedAllGather(group, packed_bytes).dispatch(**given)
        for name in ("hidden", "topk_weights", "topk_ids"):
            given[name] = given[name].repeat_interleave(2, dim=1)[:, ::2]
            assert not given[name].is_contiguous()
        comm = PaddedAllGather(group, packed_bytes)
        sent = comm.dispatch(**given)
        assert_equal(sent.hidden, plain.hidden)
        assert_equal(sent.topk_ids, plain.topk_ids)
        wide = sent.hidden.repeat_interleave(2, dim=1)[:, ::2]
        assert_equal(comm.combine(wide, sent.handle), given["hidden"] * 2)

    run_ranks(2, body)


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        pytest.param("hidden", torch.zeros(2, 4), LayoutError, r"\[local_size = 3, H\]", id="too few rows"),
        pytest.param("hidden", torch.zeros(4, 4), LayoutError, r"\[local_size = 3, H\]", id="too many rows"),
        pytest.param("hidden", torch.zeros(3), LayoutError, "hidden.shape", id="1-D hidden"),
        pytest.param("topk_ids", torch.zeros(2, 2, dtype=torch.int32), ShapeError, r"\[3, K\]", id="ids rows"),
        pytest.param("topk_ids", torch.zeros(3, dtype=torch.int32), ShapeError, "shape", id="1-D ids"),
        pytest.param("topk_weights", torch.zeros(3, 1), ShapeError, "topk_weights.shape", id="weights columns"),
        pytest.param("topk_ids", torch.zeros(3, 2), DtypeError, "int32 or int64", id="float ids"),
        pytest.param("topk_ids", torch.zeros(3, 2, dtype=torch.uint32), DtypeError, "int32 or int64", id="uint32 ids"),
        pytest.param("topk_ids", torch.zeros(3, 2, dtype=torch.bool), DtypeError, "int32 or int64", id="bool ids"),
        pytest.param("topk_weights", torch.zeros(3, 2, dtype=torch.int32), DtypeError, "floating", id="int weights"),
        pytest.param("scales", torch.zeros(2), ShapeError, "scales.shape", id="scales rows"),
        pytest.param(
            "topk_weights", torch.zeros(3, 2, device="meta"), InvalidValueError, "weights.device", id="device"
        ),
        pytest.param("scales", torch.ones(3, device="meta"), InvalidValueError, "scales.dev", id="device of scales"),
        pytest.param("num_experts", 0, ShapeError, "num_experts", id="no experts"),
        pytest.param("layout", TokenLayout.of([3, 1], 1), LayoutError, r"\(2, 0\)", id="another rank's layout"),
        pytest.param("layout", TokenLayout.of([3], 0), LayoutError, r"\(2, 0\)", id="another group's layout"),
    ],
)
def test_inputs_that_do_not_fit_are_named_before_any_collective(name, value, error, message):
    """Rank 0 alone passes the fault: it raises at once, and rank 1 waits in a collective it would wait in for ever."""
    entered = []

    def body(rank, group):
        given = inputs(TokenLayout.of([3, 1], rank))
        if rank == 0:
            given[name] = value
        try:
            PaddedAllGather(group).dispatch(**given)
        finally:
            if rank == 0:
                entered.extend(group.calls)

    with pytest.raises(error, match=message):
        run_ranks(2, body)
    assert entered == []


@pytest.mark.parametrize("shape", [(3,), (3, 2, 1)], ids=["1-D", "3-D"])
def test_ids_and_weights_that_agree_but_are_not_2_d_are_refused(shape):
    given = inputs(TokenLayout.of([3], 0))
    given |= {"topk_ids": torch.zeros(shape, dtype=torch.int32), "topk_weights": torch.ones(shape)}
    with pytest.raises(ShapeError, match=r"\[3, K\]"):
        run_ranks(1, lambda rank, group: PaddedAllGather(group).dispatch(**given))


def test_a_dtype_error_is_a_type_error():
    given = inputs(TokenLayout.of([3], 0)) | {"topk_ids": torch.zeros(3, 2)}
    with pytest.raises(TypeError):
        run_ranks(1, lambda rank, group: PaddedAllGather(group).dispatch(**given))


@pytest.mark.parametrize("handle", [None, "handle", TokenLayout.of([2], 0)], ids=repr)
def test_a_handle_of_another_strategy_is_refused(handle):
    with pytest.raises(ShapeError, match="handle"):
        run_ranks(1, lambda rank, group: PaddedAllGather(group).combine(torch.zeros(2, 4), handle))


@pytest.mark.parametrize("wrong", [0, 4, 7])
def test_a_combine_of_other_than_padded_rows_is_refused(wrong):
    def body(rank, group):
        comm = PaddedAllGather(group)
        sent = comm.dispatch(**inputs(TokenLayout.of([3, 1], rank)))
        comm.combine(sent.hidden.new_zeros(wrong, 4), sent.handle)

    with pytest.raises(ShapeError, match=r"2 \* 3 = 6"):
        run_ranks(2, body)


def test_reference_experts_work_on_what_was_dispatched_without_a_map_on_one_rank():
    """R=1: ids are local ids and expert_map may be None."""

    def body(rank, group):
        layout = TokenLayout.of([5], 0)
        comm, given = PaddedAllGather(group), inputs(layout)
        weights = data.expert_weights(0, range(4), 4, 8)
        sent = comm.dispatch(**given)
        one = ReferenceExperts().apply(sent.hidden, sent.topk_weights, sent.topk_ids, weights)
        alone = ReferenceExperts().apply(given["hidden"], given["topk_weights"], given["topk_ids"], weights)
        assert_equal(comm.combine(one, sent.handle), alone)

    run_ranks(1, body)
