"""Padded forms of vllm-ascend's two operators, and of everything in vllm-ascend 0.23 that reads what they return.

vllm-ascend's own forms cut the pad rows out after each gather and put them back before the reduce-scatter: a loop over
DP ranks with two or three device copies each time. Here rows stay where the collective put them. What follows from
that is handled here as well:

- Pad rows would be routed like tokens (all alike, so to the same experts). Their ids become -1 before the experts'
  routing operator, which keeps ids outside this rank's range out of its output: they cost no expert computation.
- Pad rows of the output are set to zero on the rank that holds them, so that what enters the next layer is finite.
- Input ids of hash routing are gathered in the same layout, pad -1 (vllm-ascend replaces -1 by a valid id).
- The gather on a second stream ("multistream overlap gate") and the record of routed experts use the same layout.
- EP includes PCP, so that nothing is gathered over PCP a second time.

Every function calls vllm-ascend's own where :func:`padded_forward` is None. Imported only after its operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from vllm.distributed import get_ep_group, get_pcp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer
from vllm_ascend.ascend_forward_context import _EXTRA_CTX, MoECommType
from vllm_ascend.distributed import utils as their_utils
from vllm_ascend.distributed.parallel_state import get_fc3_quant_x_group
from vllm_ascend.ops import register_custom_ops as their_ops
from vllm_ascend.ops.fused_moe.prepare_finalize import PrepareAndFinalizeWithAllGather, QuantType
from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAllGather

from vllm_ascend_moe.errors import LayoutError
from vllm_ascend_moe.integration.vllm_ascend_forward import is_padded, make_layout, padded_forward

# vllm-ascend's own, as they were when this module was imported.
_gather = their_ops._maybe_all_gather_and_maybe_unpad_impl
_gather_fake = their_ops._maybe_all_gather_and_maybe_unpad_fake
_reduce = their_ops._maybe_pad_and_reduce_impl
_reduce_fake = their_ops._maybe_pad_and_reduce_fake
_fc3_gather = their_utils.fc3_all_gather_and_maybe_unpad_impl
_token_dispatch = TokenDispatcherWithAllGather.token_dispatch
_prepare = PrepareAndFinalizeWithAllGather._prepare_with_ep_group
_finalize = PrepareAndFinalizeWithAllGather._finalize_with_ep_group
_gather_input_ids = PrepareAndFinalizeWithAllGather.all_gather_input_id_with_dp_group
_capture = RoutedExpertsCapturer.capture


# -- the two operators -----------------------------------------------------------------------------------------


def gather(x: torch.Tensor, label: bool, is_ep_comm: bool = False) -> torch.Tensor:
    """[M, ...] -> [R*M, ...] over EP.

    Raises:
        LayoutError: ``x`` does not have M rows.
    """
    forward = padded_forward() if label and is_ep_comm else None
    if forward is None:
        return _gather(x, label, is_ep_comm)
    forward.check_local(x)
    return get_ep_group().all_gather(x, 0)


def gather_fake(x: torch.Tensor, label: bool, is_ep_comm: bool = False) -> torch.Tensor:
    """Shape, dtype and device of :func:`gather`."""
    if not (label and is_ep_comm and is_padded()):
        return _gather_fake(x, label, is_ep_comm)
    return x.new_empty((x.shape[0] * get_ep_group().world_size, *x.shape[1:]))


def reduce(x: torch.Tensor, is_ep_comm: bool = False) -> torch.Tensor:
    """[R*M, ...] -> [M, ...], summed over EP; this rank's pad rows are zero.

    Raises:
        LayoutError: ``x`` does not have R*M rows.
    """
    forward = padded_forward() if is_ep_comm else None
    if forward is None:
        return _reduce(x, is_ep_comm)
    forward.check_gathered(x)
    out = get_ep_group().reduce_scatter(x, 0)
    if forward.keeps_pad_out and forward.layout.local_size < out.shape[0]:
        out[forward.layout.local_size :].zero_()
    return out


def reduce_fake(x: torch.Tensor, is_ep_comm: bool = False) -> torch.Tensor:
    """Shape, dtype and device of :func:`reduce`."""
    if not (is_ep_comm and is_padded()):
        return _reduce_fake(x, is_ep_comm)
    return x.new_empty((x.shape[0] // get_ep_group().world_size, *x.shape[1:]))


# -- what reads their results ----------------------------------------------------------------------------------


def fc3_gather(x: torch.Tensor) -> torch.Tensor:
    """:func:`gather` over the group of the second stream."""
    forward = padded_forward()
    if forward is None:
        return _fc3_gather(x)
    forward.check_local(x)
    return get_fc3_quant_x_group().all_gather(x, 0)


def token_dispatch(self: Any, token_dispatch_input: Any) -> Any:
    """Routes pad rows nowhere: ids -1. Without an expert map this rank has all experts, and would take -1 for one."""
    forward = padded_forward()
    if forward is not None and forward.keeps_pad_out and token_dispatch_input.routing.expert_map is not None:
        ids = token_dispatch_input.topk_ids
        forward.check_gathered(ids)
        ids.masked_fill_(forward.pad_rows(ids.device), -1)
    return _token_dispatch(self, token_dispatch_input)


def gather_input_ids(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """This DP rank's input ids [n] -> those of all rows [R*M], pad -1.

    Raises:
        LayoutError: more ids than a DP rank has rows.
    """
    forward = padded_forward()
    if forward is None:
        return _gather_input_ids(self, input_ids)
    pad = forward.padded_length - input_ids.shape[0]
    if pad < 0:
        raise LayoutError(
            "input_ids.shape[0]",
            input_ids.shape[0],
            f"at most padded_length = {forward.padded_length}",
            "Report it; ASCEND_MOE_VLLM_ASCEND=0 runs vllm-ascend without us.",
        )
    if pad:
        input_ids = F.pad(input_ids, (0, pad), value=-1)
    if self.moe_config.pcp_size > 1:
        input_ids = get_pcp_group().all_gather(input_ids, 0)
    return self.moe_config.dp_group.all_gather(input_ids, 0)


def capture(self: Any, layer_id: int, topk_ids: torch.Tensor) -> None:
    """Records the rows that the capturer expects: those of the metadata's counts, DP rank by DP rank."""
    forward = padded_forward()
    if forward is not None and _EXTRA_CTX.moe_comm_type == MoECommType.ALLGATHER:
        forward.check_gathered(topk_ids)
        reported = make_layout(forward.dp_metadata.num_tokens_across_dp_cpu.tolist(), forward.padded_length)
        topk_ids = topk_ids[reported.valid_rows(topk_ids.device)]
    _capture(self, layer_id, topk_ids)


class _WithoutPcp:
    """A MoE configuration whose PCP ranks count as EP ranks only."""

    pcp_size = 1

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@contextmanager
def _pcp_within_ep(strategy: Any) -> Iterator[None]:
    config = strategy.moe_config
    if config.pcp_size > 1 and is_padded():
        strategy.moe_config = _WithoutPcp(config)
    try:
        yield
    finally:
        strategy.moe_config = config


def prepare(
    self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, quant_type: QuantType = QuantType.NONE
) -> Any:
    """vllm-ascend's own prepare step, without a second gather over PCP."""
    with _pcp_within_ep(self):
        return _prepare(self, hidden_states, router_logits, quant_type)


def finalize(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """vllm-ascend's own finalize step, without a reduce-scatter over PCP before the one over EP."""
    with _pcp_within_ep(self):
        return _finalize(self, hidden_states)
