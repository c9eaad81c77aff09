from dataclasses import dataclass
from enum import Enum

import torch
from vllm.distributed import get_pcp_group

from vllm_ascend.distributed.utils import fc3_all_gather_and_maybe_unpad_impl
from vllm_ascend.ops import register_custom_ops as ops


class QuantType(Enum):
    NONE = 0
    W8A8 = 1


@dataclass
class MoEPrepareOutput:
    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    pertoken_scale: torch.Tensor | None


class PrepareAndFinalizeWithAllGather:
    multistream_overlap_gate = False

    def __init__(self, moe_config) -> None:
        self.moe_config = moe_config

    def _prepare_with_ep_group(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, quant_type=QuantType.NONE
    ) -> MoEPrepareOutput:
        scale = None
        if quant_type == QuantType.W8A8:
            scale = hidden_states.abs().amax(1)
        if self.multistream_overlap_gate:
            hidden_states = fc3_all_gather_and_maybe_unpad_impl(hidden_states)
        else:
            hidden_states = ops._maybe_all_gather_and_maybe_unpad_impl(hidden_states, True, True)
            router_logits = ops._maybe_all_gather_and_maybe_unpad_impl(router_logits, True, True)
        if scale is not None:
            scale = ops._maybe_all_gather_and_maybe_unpad_impl(scale, True, True)
        if self.moe_config.pcp_size > 1:
            self.num_tokens_pcp = hidden_states.shape[0]
            hidden_states = get_pcp_group().all_gather(hidden_states, 0)
            router_logits = get_pcp_group().all_gather(router_logits, 0)
        return MoEPrepareOutput(hidden_states, router_logits, scale)

    def _finalize_with_ep_group(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.moe_config.pcp_size > 1:
            hidden_states = get_pcp_group().reduce_scatter(hidden_states, 0)[: self.num_tokens_pcp]
        return ops._maybe_pad_and_reduce_impl(hidden_states, True)

    def all_gather_input_id_with_dp_group(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.moe_config.dp_group.all_gather(input_ids, 0)
