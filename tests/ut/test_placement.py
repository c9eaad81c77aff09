"""Expert placement: the arithmetic, vLLM's own maps, subgroups, errors.

Proves that every expert has one rank and slot whatever E and R are, that linear and round_robin equal the installed
vLLM's expert maps entry by entry, and what a subgroup sees. What strategies do with it is tested with them.
"""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.errors import PlacementError
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data

SHAPES = [(8, 2), (5, 2), (7, 3), (30, 8), (3, 5), (1, 4), (6, 1), (256, 32)]
MAKERS = {"linear": ExpertPlacement.linear, "round_robin": ExpertPlacement.round_robin}
placements = st.integers(1, 5).flatmap(
    lambda ep_size: st.lists(st.integers(-1, ep_size - 1), min_size=1, max_size=12).map(
        lambda ranks: ExpertPlacement.of(ranks, ep_size)
    )
)


@pytest.mark.parametrize("strategy", MAKERS)
@pytest.mark.parametrize(("num_experts", "ep_size"), SHAPES, ids=str)
def test_equals_vllms_expert_maps(strategy, num_experts, ep_size):
    manager = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager")
    placement = MAKERS[strategy](num_experts, ep_size)
    for rank in range(ep_size):
        assert placement.experts_of(rank) == data.local_experts(num_experts, rank, ep_size, strategy)
        if strategy == "round_robin" and rank > num_experts:
            continue  # vLLM raises on a rank so far past the last expert
        count, expert_map, _ = manager.determine_expert_map(ep_size, rank, num_experts, strategy)
        if expert_map is None:  # vLLM has no map on one rank
            expert_map = torch.arange(num_experts, dtype=torch.int32)
        assert placement.local_counts[rank] == count
        assert torch.equal(placement.expert_map(rank), expert_map)


@pytest.mark.parametrize("strategy", MAKERS)
@given(num_experts=st.integers(1, 40), ep_size=st.integers(1, 12))
def test_experts_are_spread_evenly_and_none_is_lost(strategy, num_experts, ep_size):
    placement = MAKERS[strategy](num_experts, ep_size)
    assert sum(placement.local_counts) == placement.num_experts == num_experts
    assert max(placement.local_counts) - min(placement.local_counts) <= 1
    assert sorted(e for rank in range(ep_size) for e in placement.experts_of(rank)) == list(range(num_experts))
    assert all(type(count) is int for count in placement.local_counts)


@given(placements)
def test_maps_lists_and_ranks_say_the_same(placement):
    rank_of = placement.rank_of()
    assert rank_of.dtype == torch.int32
    for rank in range(placement.ep_size):
        expert_map, mine = placement.expert_map(rank), placement.experts_of(rank)
        assert expert_map.dtype == torch.int32
        assert len(mine) == placement.local_counts[rank]
        assert [int(expert_map[expert]) for expert in mine] == list(range(len(mine)))
        assert torch.equal(expert_map >= 0, rank_of == rank)


@given(placements, st.data())
def test_a_subgroup_sees_its_members_experts_in_their_slots(placement, drawn):
    members = drawn.draw(st.permutations(range(placement.ep_size)))[: drawn.draw(st.integers(1, placement.ep_size))]
    part = placement.restrict(members)
    assert part.ep_size == len(members)
    assert part.num_experts == placement.num_experts
    for rank, member in enumerate(members):
        assert torch.equal(part.expert_map(rank), placement.expert_map(member))
    elsewhere = [rank not in members for rank in placement.ranks]
    assert [rank == -1 for rank in part.ranks] == elsewhere


def test_slots_may_be_in_any_order():
    placement = ExpertPlacement.of([0, 0, 1, 0], 2, slots=[2, 0, 0, 1])
    assert placement.experts_of(0) == [1, 3, 0]
    assert placement.expert_map(0).tolist() == [2, 0, -1, 1]


def test_equal_arguments_give_the_same_object_and_the_same_tensors():
    one, two = ExpertPlacement.of([0, 1, 0], 2), ExpertPlacement.of(iter((0, 1, 0)), 2, [0, 0, 1])
    assert one == two
    assert hash(one) == hash(two)
    assert ExpertPlacement.of([0, 1, 0], 2) is one
    assert ExpertPlacement.linear(6, 3) is ExpertPlacement.linear(6, 3)
    assert one.expert_map(0) is one.expert_map(0, torch.device("cpu"))
    assert one.rank_of() is one.rank_of("cpu")
    assert one.expert_map(0, "meta").device.type == "meta"
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: ExpertPlacement.of([], 2), "len", id="no experts"),
        pytest.param(lambda: ExpertPlacement.of([0, 2], 2), r"ranks\[1\] = 2", id="rank too large"),
        pytest.param(lambda: ExpertPlacement.of([-2, 0], 2), r"ranks\[0\] = -2", id="rank below -1"),
        pytest.param(lambda: ExpertPlacement.of([0, 0], 1, [0]), "len", id="too few slots"),
        pytest.param(lambda: ExpertPlacement.of([0, 0], 1, [0, 0]), "slots of rank 0", id="slot taken twice"),
        pytest.param(lambda: ExpertPlacement.of([0, 0], 1, [0, 2]), "slots of rank 0", id="gap"),
        pytest.param(lambda: ExpertPlacement.of([0, -1], 1, [0, 0]), r"slots\[1\]", id="slot without a rank"),
        pytest.param(lambda: ExpertPlacement.of([0], 0), "ep_size", id="no ranks"),
        pytest.param(lambda: ExpertPlacement.linear(0, 2), "num_experts = 0", id="no experts, linear"),
        pytest.param(lambda: ExpertPlacement.round_robin(4, 0), "ep_size = 0", id="no ranks, round_robin"),
        pytest.param(lambda: ExpertPlacement.linear(4, 2).expert_map(2), "rank = 2", id="map of no rank"),
        pytest.param(lambda: ExpertPlacement.linear(4, 2).expert_map(-1), "rank = -1", id="map of rank -1"),
        pytest.param(lambda: ExpertPlacement.linear(4, 2).restrict([0, 0]), "group_ranks", id="member twice"),
        pytest.param(lambda: ExpertPlacement.linear(4, 2).restrict([2]), "group_ranks", id="no such member"),
    ],
)
def test_what_contradicts_itself_is_named(make, message):
    with pytest.raises(PlacementError, match=message):
        make()
