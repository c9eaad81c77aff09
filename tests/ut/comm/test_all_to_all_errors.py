"""All-to-all by row on all ranks in one process: wrong inputs on one rank, ranks that differ, errors of the backend."""

import re

import pytest
import torch
from rows_layers import inputs, linear

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.errors import CommError, DtypeError, InvalidValueError, LayoutError, PlacementError, ShapeError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing.compare import assert_equal
from vllm_ascend_moe.testing.fake_group import run_ranks

FAULTS = {
    "too few rows": ("hidden", torch.zeros(2, 4), LayoutError, r"\[local_size = 3, H\]"),
    "1-D hidden": ("hidden", torch.zeros(3), LayoutError, "hidden.shape"),
    "ids rows": ("topk_ids", torch.zeros(2, 2, dtype=torch.int32), ShapeError, r"\[3, K\]"),
    "float ids": ("topk_ids", torch.zeros(3, 2), DtypeError, "int32 or int64"),
    "uint32 ids": ("topk_ids", torch.zeros(3, 2, dtype=torch.uint32), DtypeError, "int32 or int64"),
    "int weights": ("topk_weights", torch.zeros(3, 2, dtype=torch.int32), DtypeError, "floating"),
    "scales rows": ("scales", torch.zeros(2), ShapeError, "scales.shape"),
    "ids elsewhere": ("topk_ids", torch.zeros(3, 2, dtype=torch.int32, device="meta"), InvalidValueError, "ids.device"),
    "another number of experts": ("num_experts", 6, PlacementError, "num_experts = 6, .* the placement's 4"),
    "another rank's layout": ("layout", TokenLayout.of([3, 1, 2], 1), LayoutError, r"\(3, 0\)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_with_wrong_inputs_names_them_and_the_others_name_the_rank(name):
    field, value, error, message = FAULTS[name]

    def body(rank, group):
        given, comm = inputs(TokenLayout.of([3, 1, 2], rank)), linear(group)
        with pytest.raises(error if rank == 0 else CommError) as raised:
            comm.dispatch(**given | ({field: value} if rank == 0 else {}))
        # All can go on: nobody is a collective ahead.
        sent = comm.dispatch(**given)
        comm.combine(sent.hidden, sent.handle)
        return str(raised.value)

    messages = run_ranks(3, body)
    assert re.search(message, messages[0])
    assert all(re.search(r"all_to_all: dispatch failed .*rank \d of 3: ranks \[0\] refused", m) for m in messages[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda given: {"hidden": given["hidden"].double()}, "bytes of a row", id="dtype"),
        pytest.param(lambda given: {"hidden": given["hidden"].repeat(1, 4)}, "bytes of a row", id="hidden size"),
        pytest.param(lambda given: {"topk_ids": given["topk_ids"].long()}, "bytes of a row", id="id dtype"),
    ],
)
def test_ranks_whose_rows_differ_all_say_so(change, message):
    """Backends would read past a buffer, or hang."""

    def body(rank, group):
        given = inputs(TokenLayout.of([3, 1, 2], rank))
        with pytest.raises(LayoutError, match=message) as raised:
            linear(group).dispatch(**given | (change(given) if rank == 2 else {}))
        return str(raised.value)

    messages = run_ranks(3, body)
    assert "{2: " in messages[0]
    assert "{0: " in messages[2]


def test_what_a_rank_was_told_of_other_ranks_tokens_leaves_nobody_alone():
    """Rank 1 has more tokens than ranks 0 and 2 were told, and all of them come to rank 0. A refusal by rank 0 alone
    would leave the others waiting for its rows."""

    def body(rank, group):
        given = inputs(TokenLayout.of([1, 4, 2] if rank == 1 else [1, 1, 2], rank))
        given["topk_ids"] = torch.zeros_like(given["topk_ids"])
        comm = linear(group)
        sent = comm.dispatch(**given)
        assert sent.hidden.shape[0] == (7 if rank == 0 else 0)
        assert_equal(comm.combine(sent.hidden, sent.handle), given["hidden"])

    run_ranks(3, body)


def test_a_placement_of_another_group_is_refused_when_the_strategy_is_made():
    with pytest.raises(PlacementError, match=r"placement.ep_size = 3, .* world_size = 1"):
        run_ranks(1, lambda rank, group: AllToAll(group, ExpertPlacement.linear(4, 3)))


@pytest.mark.parametrize("handle", [None, "handle"], ids=repr)
def test_a_handle_of_another_strategy_is_refused(handle):
    with pytest.raises(ShapeError, match="handle"):
        run_ranks(1, lambda rank, group: linear(group).combine(torch.zeros(2, 4), handle))


@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (5,)], ids=str)
def test_a_combine_of_other_than_the_dispatched_rows_is_refused(shape):
    def body(rank, group):
        comm = linear(group)
        comm.combine(torch.zeros(shape), comm.dispatch(**inputs(TokenLayout.of([5], 0))).handle)

    with pytest.raises(ShapeError, match=r"\[5, H\]"):
        run_ranks(1, body)


def test_an_error_of_the_backend_names_strategy_step_and_group():
    class Broken:
        world_size, rank_in_group, unique_name = 1, 0, "ep:0"

        def all_to_all(self, *_):
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(CommError, match="all_to_all: exchange of row counts failed on ep:0, rank 0 of 1: RuntimeErr"):
        linear(Broken()).dispatch(**inputs(TokenLayout.of([5], 0)))
