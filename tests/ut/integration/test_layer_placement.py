"""A layer's expert map says how vLLM placed experts; what a strategy gets agrees with vLLM's own maps on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from vllm_ascend_moe.errors import PlacementError
from vllm_ascend_moe.integration import placement
from vllm_ascend_moe.integration.placement import placement_in_group, placement_of

SIZES = [(8, 2), (5, 2), (7, 3), (30, 8), (4, 4), (2, 3), (1, 2), (160, 16)]


def vllm_map(num_experts: int, rank: int, ranks: int, strategy: str) -> torch.Tensor:
    _, found, _ = determine_expert_map(ranks, rank, num_experts, strategy)
    assert found is not None
    return found


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("num_experts", "ranks"), SIZES)
def test_every_rank_finds_the_placement_of_all(num_experts: int, ranks: int, strategy: str) -> None:
    maps = [vllm_map(num_experts, rank, ranks, strategy) for rank in range(ranks)]
    found = {placement_of(expert_map, num_experts, rank, ranks) for rank, expert_map in enumerate(maps)}
    assert len(found) == 1
    [one] = found
    for rank, expert_map in enumerate(maps):
        assert torch.equal(one.expert_map(rank), expert_map)


def test_another_placement_is_refused_with_the_map() -> None:
    with pytest.raises(PlacementError, match=r"expert_map of EP rank 1 = \[0, -1, -1, 1\].*padded_allgather"):
        placement_of(torch.tensor([0, -1, -1, 1]), 4, 1, 2)
    with pytest.raises(PlacementError, match="expert_map of EP rank 0 = None"):
        placement_of(None, 4, 0, 2)
    # Right on another rank, wrong on this one.
    with pytest.raises(PlacementError):
        placement_of(vllm_map(4, 0, 2, "linear"), 4, 1, 2)


def test_all_experts_here() -> None:
    assert placement_of(None, 3, 0, 1).expert_map(0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 4)])
def test_groups_of_one_tp_rank_share_the_experts_out(
    dp: int, tp: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DP groups (each the DP ranks of one TP rank) hold different experts, all together every one, once."""
    num_experts, owners = 11, [[] for _ in range(11)]
    for tp_rank in range(tp):
        group_ranks = [4 + dp_rank * tp + tp_rank for dp_rank in range(dp)]  # global ranks need not begin at 0
        for dp_rank in range(dp):
            ep_rank = dp_rank * tp + tp_rank
            ep = SimpleNamespace(rank_in_group=ep_rank, world_size=dp * tp, ranks=list(range(4, 4 + dp * tp)))
            monkeypatch.setattr(placement, "get_ep_group", lambda ep=ep: ep)
            monkeypatch.setattr(placement, "get_dp_group", lambda ranks=group_ranks: SimpleNamespace(ranks=ranks))
            expert_map = vllm_map(num_experts, ep_rank, dp * tp, strategy)
            seen = placement_in_group(expert_map, num_experts, "dp")
            assert torch.equal(seen.expert_map(dp_rank), expert_map)
        for expert, owner in enumerate(seen.ranks):
            owners[expert] += [(tp_rank, owner)] if owner >= 0 else []
    assert [len(found) for found in owners] == [1] * num_experts
