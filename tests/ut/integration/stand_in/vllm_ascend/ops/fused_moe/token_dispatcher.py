from dataclasses import dataclass

import torch
from vllm.distributed import get_ep_group


@dataclass(frozen=True, slots=True)
class MoERoutingParams:
    expert_map: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class MoETokenDispatchInput:
    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    routing: MoERoutingParams


class TokenDispatcherWithAllGather:
    def __init__(self, num_local_experts: int) -> None:
        self.num_experts_local = num_local_experts

    def token_dispatch(self, token_dispatch_input: MoETokenDispatchInput):
        """(row, expert, weight) of this rank's experts: the routing operator keeps ids in range only."""
        ids, expert_map = token_dispatch_input.topk_ids, token_dispatch_input.routing.expert_map
        weights = token_dispatch_input.topk_weights
        first, last = 0, self.num_experts_local
        if expert_map is not None:
            weights = weights * (expert_map[ids] != -1)
            first = get_ep_group().rank_in_group * self.num_experts_local
            last = first + self.num_experts_local
        row, slot = torch.nonzero((ids >= first) & (ids < last), as_tuple=True)
        return row, ids[row, slot], weights[row, slot]
