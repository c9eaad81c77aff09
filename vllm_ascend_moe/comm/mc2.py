"""Dispatch and combine fused with their communication: npu_moe_distribute_dispatch_v2 and _combine_v2 of torch_npu.

Two launches a layer, no synchronisation, every shape known beforehand. Rows arrive by local expert, one for each choice
of each token, and leave unweighted; the combine weights and sums them at home in fp32.

    what the operators want                          what is done here
    as many tokens on every rank where some          every rank brings M rows, the first T_r of them active
    are inactive; at least 1
    expert e on rank e / (E / R)                     ids become positions in that order, whatever the placement
    ids within [0, E)                                an unrouted choice goes somewhere with a weight of 0, the one
                                                     case where it costs work (Atlas A2 masks whole tokens only)
    bf16 or fp16                                     a typed error otherwise; int8 on the way out is theirs
    limits of sizes, and a buffer of HCCL            typed errors when the strategy is made, alike on every rank

Symbols: T_r tokens of this rank; M max_local_size; R ranks; K top-k; E experts; E_l local experts; H hidden size;
A = M * R * min(E_l, K) rows that may arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.comm.checks import (
    check_dispatch_inputs,
    check_handle,
    check_placement_experts,
    check_placement_group,
    comm_error,
)
from vllm_ascend_moe.comm.mc2_limits import check_sizes
from vllm_ascend_moe.errors import CapacityError, DtypeError, ShapeError, UnsupportedError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup, pad_rows
from vllm_ascend_moe.placement import ExpertPlacement

_UNQUANTIZED, _DYNAMIC, _COUNTS = 0, 2, 1


@dataclass(frozen=True, kw_only=True)
class _Handle:
    layout: TokenLayout
    ids: torch.Tensor  # int32 [M, K]
    weights: torch.Tensor  # fp32 [M, K]
    active: torch.Tensor  # bool [M]
    assist_info: torch.Tensor
    counts: torch.Tensor


class MC2:
    """The strategy for decoding on NPUs. See :class:`~vllm_ascend_moe.comm.base.TokenComm`.

    Args:
        group: the ranks, of a process group that nothing else uses: the operators keep state in its buffer.
        placement: which rank holds which expert; as many on every rank.
        max_tokens: the most tokens of a rank in one step, the same on every rank, as are all arguments.
        hidden_size: H; top_k: K.
        quantize: tokens travel in int8, each with its own scale, and are handed on so.

    Raises:
        PlacementError, CapacityError, ShapeError: sizes that the operators do not take.
        ConfigError: HCCL_BUFFSIZE is too small, with what is needed and given.
    """

    format = ActivationFormat.ROWS

    def __init__(
        self,
        group: TorchGroup,
        placement: ExpertPlacement,
        *,
        max_tokens: int,
        hidden_size: int,
        top_k: int,
        quantize: bool = False,
    ) -> None:
        check_placement_group(placement, group)
        check_sizes(placement, max_tokens, hidden_size, top_k)
        self.group, self.placement, self.max_tokens, self.quantize = group, placement, max_tokens, quantize
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def dispatch(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        num_experts: int,
        layout: TokenLayout,
        scales: torch.Tensor | None = None,
    ) -> Dispatched:
        """Brings hidden [T_r, H] to its experts: [A, H], one row for a choice, ids [A, 1], weights of 1.

        Raises:
            CapacityError: some rank has more than ``max_tokens``; on every rank.
            LayoutError, ShapeError, DtypeError, PlacementError: inputs that do not fit. CommError: the backend failed.
            UnsupportedError: tokens that are quantised already; pass ``quantize`` to the strategy.
        """
        rows = layout.max_local_size
        if rows > self.max_tokens:
            raise CapacityError(
                "layout.max_local_size",
                rows,
                f"at most {self.max_tokens}",
                "Raise max_tokens, or use another strategy.",
            )
        check_dispatch_inputs(hidden, topk_weights, topk_ids, scales, num_experts, layout, self.group)
        check_placement_experts(self.placement, num_experts)
        if scales is not None:
            raise UnsupportedError("mc2 quantises tokens itself. Pass quantize=True to it, and tokens in 16 bits.")
        if hidden.dtype not in (torch.bfloat16, torch.float16):
            raise DtypeError("hidden.dtype", hidden.dtype, "bfloat16 or float16", "Cast hidden, or use all_to_all.")
        positions, own = self._tables_on(hidden.device)
        ids = positions.index_select(0, (topk_ids.clamp(-1, num_experts) + 1).flatten()).view(topk_ids.shape)
        nowhere = ids < 0
        handle_ids = pad_rows(ids.clamp(min=0), rows)
        weights = pad_rows(topk_weights.to(torch.float32).masked_fill(nowhere, 0), rows)
        # What is multiplied by a weight of 0 must be finite.
        x = pad_rows(hidden.masked_fill(nowhere.all(1, keepdim=True), 0), rows)
        active = torch.arange(rows, device=hidden.device) < layout.local_size
        if rows == 0:
            empty = handle_ids.new_zeros((0,))
            handle = _Handle(layout=layout, ids=ids, weights=weights, active=active, assist_info=empty, counts=empty)
            return self._dispatched(x, None, handle_ids[:, :1], handle)
        received, row_scales, assist_info, per_expert, counts, _, _ = self._call(
            "dispatch",
            _npu().npu_moe_distribute_dispatch_v2,
            (x, handle_ids),
            rows,
            x_active_mask=active,
            quant_mode=_DYNAMIC if self.quantize else _UNQUANTIZED,
            expert_token_nums_type=_COUNTS,
        )
        handle = _Handle(
            layout=layout, ids=handle_ids, weights=weights, active=active, assist_info=assist_info, counts=counts
        )
        # Rows past the last expert's find the -1 at the end.
        place = torch.arange(received.shape[0], device=received.device)
        slots = torch.searchsorted(per_expert.cumsum(0), place, right=True)
        return self._dispatched(
            received, row_scales if self.quantize else None, own.index_select(0, slots).view(-1, 1), handle
        )

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        """Brings rows [A, H] home, weights and sums them in fp32: [T_r, H] in their dtype.

        Raises:
            ShapeError: another strategy's handle, or not one row for each row of the dispatch. CommError: the backend
            failed.
        """
        check_handle(handle, _Handle)
        assert isinstance(handle, _Handle)
        rows = handle.layout.max_local_size
        want = rows * self.group.world_size * min(self._num_local, handle.ids.shape[1])
        if expert_output.dim() != 2 or expert_output.shape[0] != want:
            raise ShapeError(
                "expert_output.shape", tuple(expert_output.shape), f"[{want}, H]", "Pass one row per dispatched row."
            )
        if rows == 0:
            return expert_output.clone()
        out = self._call(
            "combine",
            _npu().npu_moe_distribute_combine_v2,
            (expert_output, handle.ids, handle.assist_info, handle.counts, handle.weights),
            rows,
            x_active_mask=handle.active,
        )
        return out[: handle.layout.local_size]

    # -- parts -------------------------------------------------------------------------------------------------

    @property
    def _num_local(self) -> int:
        return self.placement.num_experts // self.group.world_size

    def _dispatched(
        self, hidden: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, handle: _Handle
    ) -> Dispatched:
        ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return Dispatched(
            format=self.format, hidden=hidden, topk_weights=ones, topk_ids=ids, scales=scales, handle=handle
        )

    def _call(self, step: str, operator: Any, tensors: tuple[torch.Tensor, ...], rows: int, **options: Any) -> Any:
        ranks, rank = self.group.world_size, self.group.rank_in_group
        backend: Any = self.group.device_group._get_backend(tensors[0].device)
        try:
            return operator(
                *tensors,
                group_ep=backend.get_hccl_comm_name(rank),
                ep_world_size=ranks,
                ep_rank_id=rank,
                moe_expert_num=self.placement.num_experts,
                global_bs=rows * ranks,
                **options,
            )
        except RuntimeError as error:
            raise comm_error(error, "mc2", step, self.group) from error

    def _tables_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [E + 2]: the position of expert e at e + 1, -1 at both ends; int32 [E_l + 1]: own experts, then -1."""
        found = self._tables.get(device)
        if found is None:
            order = [e for rank in range(self.group.world_size) for e in self.placement.experts_of(rank)]
            positions = [-1] * (len(order) + 2)
            for position, expert in enumerate(order):
                positions[expert + 1] = position
            own = [*self.placement.experts_of(self.group.rank_in_group), -1]
            made = (torch.tensor(values, dtype=torch.int32, device=device) for values in (positions, own))
            found = self._tables[device] = (next(made), next(made))
        return found


def _npu() -> Any:
    return import_module("torch_npu")
