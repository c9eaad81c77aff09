"""Where one MoE layer's experts live, as its own expert map says, seen by the group the layer communicates over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_dp_group, get_ep_group, get_pcp_group

from vllm_ascend_moe.errors import PlacementError
from vllm_ascend_moe.ops.forward_layouts import GroupName
from vllm_ascend_moe.placement import ExpertPlacement

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


def group_of(name: GroupName) -> GroupCoordinator:
    """vLLM's group of that name."""
    return {"ep": get_ep_group, "dp": get_dp_group, "pcp": get_pcp_group}[name]()


def placement_in_group(expert_map: torch.Tensor | None, num_experts: int, name: GroupName) -> ExpertPlacement:
    """The placement a strategy of that group needs.

    Where TP ranks hold the same tokens (groups "dp" and "pcp"), a group has one rank of each TP group, and so not all
    experts: those of the other TP ranks live on rank -1. Each TP rank brings its tokens to its own group's experts,
    and vLLM's runner sums over TP.

    Args:
        expert_map: int32 [E] of this rank, as the layer has it. With EPLB, E counts physical experts.
        num_experts: E.
        name: the group.

    Raises:
        PlacementError: see :func:`placement_of`.
    """
    ep, group = get_ep_group(), group_of(name)
    whole = placement_of(expert_map, num_experts, ep.rank_in_group, ep.world_size)
    return whole.restrict([ep.ranks.index(rank) for rank in group.ranks])


def placement_of(expert_map: torch.Tensor | None, num_experts: int, ep_rank: int, ep_size: int) -> ExpertPlacement:
    """Placement of all ranks' experts, from one rank's expert map.

    vLLM places experts ``linear`` or ``round_robin`` and may fall back from the second to the first by rules of its
    own, so the map says which it was. The two never agree in one rank's map and differ in another's.

    Raises:
        PlacementError: the map is neither.
    """
    if expert_map is None and ep_size == 1:
        return ExpertPlacement.linear(num_experts, 1)
    found = None if expert_map is None else expert_map.tolist()
    for make in (ExpertPlacement.linear, ExpertPlacement.round_robin):
        placement = make(num_experts, ep_size)
        if found == placement.expert_map(ep_rank).tolist():
            return placement
    raise PlacementError(
        f"expert_map of EP rank {ep_rank}",
        found,
        f"linear or round_robin with {num_experts} experts on {ep_size} ranks",
        'Use one of these two placements, or comm = "padded_allgather", which works with any.',
    )
