"""vLLM's prepare and finalize steps on top of our strategies.

Each step takes the layout of its pass from the forward context (:class:`ForwardLayouts`), where the layer has put it,
and leaves there what finalize needs from prepare. Steps themselves hold no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalizeModular,
    PrepareResultType,
    TopKWeightAndReduce,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from vllm_ascend_moe.comm.all_gather import row_bytes
from vllm_ascend_moe.comm.base import ActivationFormat, TokenComm
from vllm_ascend_moe.comm.padded_all_gather import PAD_VALUES
from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.integration.forward_state import current_layouts
from vllm_ascend_moe.ops.native import packed_all_gather
from vllm_ascend_moe.ops.register_custom_ops import group_and_layout


class _PrepareFinalize(FusedMoEPrepareAndFinalizeModular):
    """What the steps below share. Rows format: weights are applied and summed by the experts."""

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def output_is_reduced(self) -> bool:
        # Over the group of the layer it is; the sum over TP ranks (where there is one) is the runner's.
        return False

    def num_dispatchers(self) -> int:
        return 1

    def _weighted_input(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, apply_router_weight_on_input: bool
    ) -> torch.Tensor:
        if not apply_router_weight_on_input:
            return a1
        if topk_weights.shape[1] != 1:
            raise ShapeError(
                "topk_weights.shape[1]",
                topk_weights.shape[1],
                "1 where apply_router_weight_on_input is set",
                "Use a model with top-1 routing, or apply the weights on the output.",
            )
        return a1 * topk_weights.to(a1.dtype)

    def _check_experts(self, given: TopKWeightAndReduce) -> None:
        rows = self.activation_format is FusedMoEActivationFormat.Standard
        wanted = TopKWeightAndReduceNoOP if rows else TopKWeightAndReduceDelegate
        if not isinstance(given, wanted):
            raise ShapeError(
                "weight_and_reduce_impl",
                type(given).__name__,
                wanted.__name__,
                "Pair this step with experts that apply weights and sum over top-k themselves."
                if rows
                else "Pair this step with experts that leave weights and the sum over top-k to it.",
            )


class LocalPrepareFinalize(_PrepareFinalize):
    """No communication: the tokens are here, and so are the experts or the runner's all-reduce."""

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        return self._weighted_input(a1, topk_weights, apply_router_weight_on_input), None, None, None, None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        self._check_experts(weight_and_reduce_impl)
        if output.data_ptr() != fused_expert_output.data_ptr():
            output.copy_(fused_expert_output)


class PaddedPrepareFinalize(_PrepareFinalize):
    """Padded all-gather through the two operators.

    Args:
        num_dispatchers: ranks of the group.
        packed_bytes: up to this many bytes a rank, hidden states, ids and weights travel in one packed collective
            instead of one operator call each; 0 never packs. The same on every rank.
    """

    def __init__(self, num_dispatchers: int, packed_bytes: int) -> None:
        super().__init__()
        self._num_dispatchers = num_dispatchers
        self._packed_bytes = packed_bytes

    def num_dispatchers(self) -> int:
        return self._num_dispatchers

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        hidden = self._weighted_input(a1, topk_weights, apply_router_weight_on_input)
        hidden, topk_weights, topk_ids = self._gather([hidden, topk_weights, topk_ids])
        return hidden, None, None, topk_ids, topk_weights

    def _gather(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        group, layout = group_and_layout()
        if layout is not None and layout.max_local_size * row_bytes(tensors) <= self._packed_bytes:
            return packed_all_gather(tensors, PAD_VALUES[:3], layout.max_local_size, group)
        return [torch.ops.vllm.maybe_all_gather_and_maybe_unpad(x) for x in tensors]

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        self._check_experts(weight_and_reduce_impl)
        output.copy_(torch.ops.vllm.maybe_pad_and_reduce(fused_expert_output))


class CommPrepareFinalize(_PrepareFinalize):
    """Any :class:`TokenComm`, in its activation format.

    Args:
        comm: the strategy.
        num_dispatchers: ranks of the group.
        capacity: C, of a batched strategy.
    """

    def __init__(self, comm: TokenComm, num_dispatchers: int, capacity: int | None = None) -> None:
        super().__init__()
        self.comm = comm
        self._num_dispatchers = num_dispatchers
        self._capacity = capacity

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        if self.comm.format is ActivationFormat.ROWS:
            return FusedMoEActivationFormat.Standard
        return FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return self._capacity

    def num_dispatchers(self) -> int:
        return self._num_dispatchers

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        hidden = self._weighted_input(a1, topk_weights, apply_router_weight_on_input)
        if apply_router_weight_on_input:
            # They are in the input now: whoever multiplies by weights later must not do it again.
            topk_weights = torch.ones_like(topk_weights)
        layouts = current_layouts()
        sent = self.comm.dispatch(hidden, topk_weights, topk_ids, num_experts=num_experts, layout=layouts.layout())
        layouts.handle = sent.handle
        if sent.expert_num_tokens is None:
            return sent.hidden, sent.scales, None, sent.topk_ids, sent.topk_weights
        return sent.hidden, sent.scales, ExpertTokensMetadata(sent.expert_num_tokens, None), None, None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        self._check_experts(weight_and_reduce_impl)
        layouts = current_layouts()
        handle, layouts.handle = layouts.handle, None
        output.copy_(self.comm.combine(fused_expert_output, handle))
