"""The batched strategy on all ranks in one process: capacity, agreement of ranks, errors."""

import pytest
import torch
from batched_layers import inputs, layer

from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.errors import CapacityError, CommError, ConfigError, InvalidValueError, PlacementError, ShapeError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing.fake_group import run_ranks

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
