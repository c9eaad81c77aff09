"""Dispatch and combine fused with their communication: npu_moe_distribute_dispatch_v2 and _combine_v2 of torch_npu.

Two launches a layer, no synchronisation, every shape known beforehand. Rows arrive by local expert, one for each choice
of each token, and leave unweighted; the combine weights and sums them at home in fp32.

    what the operators want                          what is done here
    as many tokens on every rank where some          every rank brings M rows, the first T_r of them active
    are inactive; at least 1
    expert e on rank e / (E / R)                     ids become positions in that order, whatever the placement
    ids within [0, E), of a token all different      an unrouted choice goes to an expert that the token has not chosen,
                                                     with a weight of 0: the one case where it costs work
    bf16 or fp16                                     a typed error otherwise; int8 on the way out is theirs
    limits of sizes, and a buffer of HCCL            typed errors when the strategy is made, alike on every rank
    a communicator of their own                      ``own_group``

A token that names an expert twice is not for this strategy: the operators want different ids.

Symbols: T_r tokens of this rank; M max_local_size; R ranks; K top-k; E experts of the group; E_l of this rank; H hidden
size; A = M * R * min(E_l, K) rows that may arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.comm.checks import (
    check_dispatch_inputs,
    check_handle,
    check_placement_experts,
    check_placement_group,
    comm_error,
)
from vllm_ascend_moe.comm.mc2_limits import PRODUCTS, Sizes, buffer_mib_given, fault_of
from vllm_ascend_moe.comm.payload import dequantize_tokens
from vllm_ascend_moe.errors import CapacityError, DtypeError, PlacementError, ShapeError, UnsupportedError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import Group, TorchGroup, pad_rows
from vllm_ascend_moe.ops.npu import npu_operator
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


class _OnDevice(NamedTuple):
    """What is made once; a compiled graph reads it as it is."""

    positions: torch.Tensor
    """int32 [E' + 2], of all E' experts: the position of expert e at e + 1; -1 at both ends and for other groups'."""
    own: torch.Tensor
    """int32 [E_l + 1]: own experts, then -1."""
    comm_name: str
    dispatch: Any
    combine: Any


class MC2:
    """The strategy for decoding on NPUs. See :class:`~vllm_ascend_moe.comm.base.TokenComm`.

    Under torch.compile, dispatch once before or call :meth:`prepare`.

    Errors: what follows from the sizes and the layout (limits, more tokens than ``max_tokens``) every rank raises,
    before anything is sent. Other wrong inputs, and those of combine, are an error on the rank that has them alone: the
    others wait for it, in their operator or, at the first dispatch, while they make the communicator, until HCCL gives
    up (a CommError on the soft NPU when its timeout is over; on hardware it was not tried).

    Args:
        group: the ranks, of a process group that nothing else uses: see :func:`own_group`.
        placement: which rank holds which expert; as many on every rank.
        max_tokens: the most tokens of a rank in one step, the same on every rank, as are all arguments.
        hidden_size: H; top_k: K.
        quantize: tokens travel in int8, each with its own scale, and are handed on so.
        dequantize: tokens that travelled in int8 are handed on in the type they were given in.
        product: "atlas-a2" or "atlas-a3", whose limits hold.

    Raises:
        PlacementError, CapacityError, ShapeError, InvalidValueError: sizes that the operators do not take.
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
        dequantize: bool = False,
        product: str = "atlas-a2",
    ) -> None:
        check_placement_group(placement, group)
        counts = placement.local_counts
        if len(set(counts)) != 1:
            action = "Use all_to_all, which takes any placement."
            raise PlacementError("experts by rank", list(counts), "equal", action)
        sizes = Sizes(
            ranks=placement.ep_size,
            num_experts=sum(counts),
            max_tokens=max_tokens,
            hidden_size=hidden_size,
            top_k=top_k,
        )
        fault = fault_of(sizes, PRODUCTS[product], buffer_mib_given())
        if fault is not None:
            raise fault
        self.group, self.placement, self.max_tokens = group, placement, max_tokens
        self.quantize, self.dequantize = quantize, dequantize
        self._num_local, self._sizes = counts[0], sizes
        self._prepared: _OnDevice | None = None

    def prepare(self, device: torch.device) -> _OnDevice:
        """Makes tables, and the communicator where there is none yet; every rank calls it, the first dispatch does.

        Raises:
            CommError: the backend failed.
        """
        ranks, rank = self.group.world_size, self.group.rank_in_group
        order = [e for each in range(ranks) for e in self.placement.experts_of(each)]
        positions = [-1] * (self.placement.num_experts + 2)
        for position, expert in enumerate(order):
            positions[expert + 1] = position
        own = [*self.placement.experts_of(rank), -1]
        backend: Any = self.group.device_group._get_backend(device)
        try:
            comm_name = backend.get_hccl_comm_name(rank)
        except RuntimeError as error:
            raise comm_error(error, "mc2", "prepare", self.group) from error
        with torch.inference_mode(False):
            tables = [torch.tensor(values, dtype=torch.int32, device=device) for values in (positions, own)]
        self._prepared = _OnDevice(
            positions=tables[0],
            own=tables[1],
            comm_name=comm_name,
            dispatch=npu_operator("npu_moe_distribute_dispatch_v2"),
            combine=npu_operator("npu_moe_distribute_combine_v2"),
        )
        return self._prepared

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
            action = "Raise max_tokens, or use another strategy."
            raise CapacityError("layout.max_local_size", rows, f"at most {self.max_tokens}", action)
        check_dispatch_inputs(hidden, topk_weights, topk_ids, scales, num_experts, layout, self.group)
        check_placement_experts(self.placement, num_experts)
        self._check_sizes(hidden, topk_ids)
        if scales is not None:
            raise UnsupportedError("mc2 quantises tokens itself. Pass quantize=True to it, and tokens in 16 bits.")
        if hidden.dtype not in (torch.bfloat16, torch.float16):
            raise DtypeError("hidden.dtype", hidden.dtype, "bfloat16 or float16", "Cast hidden, or use all_to_all.")
        here = self._prepared or self.prepare(hidden.device)
        found = here.positions.index_select(0, (topk_ids.clamp(-1, num_experts) + 1).flatten()).view(topk_ids.shape)
        nowhere = found < 0
        ids = pad_rows(_all_different(found, nowhere), rows)
        weights = pad_rows(topk_weights.to(torch.float32).masked_fill(nowhere, 0), rows)
        # What is multiplied by a weight of 0 must be finite.
        x = pad_rows(hidden.masked_fill(nowhere.all(1, keepdim=True), 0), rows)
        active = torch.arange(rows, device=hidden.device) < layout.local_size
        if rows == 0:
            empty = ids.new_zeros((0,))
            handle = _Handle(layout=layout, ids=ids, weights=weights, active=active, assist_info=empty, counts=empty)
            return self._dispatched(x, None, ids[:, :1], handle)
        received, row_scales, assist_info, per_expert, counts, _, _ = self._call(
            "dispatch",
            here.dispatch,
            (x, ids),
            rows,
            x_active_mask=active,
            quant_mode=_DYNAMIC if self.quantize else _UNQUANTIZED,
            expert_token_nums_type=_COUNTS,
        )
        if not self.quantize:
            row_scales = None
        elif self.dequantize:
            received, row_scales = dequantize_tokens(received, row_scales, hidden.dtype), None
        handle = _Handle(layout=layout, ids=ids, weights=weights, active=active, assist_info=assist_info, counts=counts)
        # Rows past the last expert's find the -1 at the end.
        place = torch.arange(received.shape[0], device=received.device)
        slots = torch.searchsorted(per_expert.cumsum(0), place, right=True)
        return self._dispatched(received, row_scales, here.own.index_select(0, slots).view(-1, 1), handle)

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
        assert self._prepared is not None, "dispatch came before"
        out = self._call(
            "combine",
            self._prepared.combine,
            (expert_output, handle.ids, handle.assist_info, handle.counts, handle.weights),
            rows,
            x_active_mask=handle.active,
        )
        return out[: handle.layout.local_size]

    # -- parts -------------------------------------------------------------------------------------------------

    def _check_sizes(self, hidden: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """The limits hold for the sizes that the strategy was made with, and HCCL's buffer has room for these alone."""
        given, wanted = (hidden.shape[1], topk_ids.shape[1]), (self._sizes.hidden_size, self._sizes.top_k)
        if given != wanted:
            raise ShapeError("(H, K) of the tokens", given, f"{wanted}, as the strategy was made", "Make it for these.")

    def _dispatched(
        self, hidden: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, handle: _Handle
    ) -> Dispatched:
        ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return Dispatched(
            format=self.format, hidden=hidden, topk_weights=ones, topk_ids=ids, scales=scales, handle=handle
        )

    def _call(self, step: str, operator: Any, tensors: tuple[torch.Tensor, ...], rows: int, **options: Any) -> Any:
        assert self._prepared is not None
        ranks = self.group.world_size
        try:
            return operator(
                *tensors,
                group_ep=self._prepared.comm_name,
                ep_world_size=ranks,
                ep_rank_id=self.group.rank_in_group,
                moe_expert_num=self._num_local * ranks,
                global_bs=rows * ranks,
                **options,
            )
        except RuntimeError as error:
            raise comm_error(error, "mc2", step, self.group) from error


def _all_different(positions: torch.Tensor, nowhere: torch.Tensor) -> torch.Tensor:
    """``positions`` int32 [T_r, K] with those that are ``nowhere`` replaced by ones that the token has not chosen.

    Of the first K positions a token has chosen at most as many as it has choices that are somewhere, so that enough are
    left, and the n-th choice that is nowhere takes the n-th of them.
    """
    candidates = torch.arange(positions.shape[1], dtype=positions.dtype, device=positions.device)
    chosen = (positions[:, :, None] == candidates).any(1)
    left = chosen.to(torch.int32).argsort(dim=1, stable=True)
    order = (nowhere.cumsum(1) - 1).clamp(min=0)
    return torch.where(nowhere, left.gather(1, order).to(positions.dtype), positions)


# By process group; layers share one. Weak: a destroyed group must not be kept alive here.
_own_groups: WeakKeyDictionary[dist.ProcessGroup, TorchGroup] = WeakKeyDictionary()


def own_group(group: Group) -> TorchGroup:
    """A group of the same ranks for the operators alone: they keep state in the buffer of their communicator.

    Args:
        group: with a ``device_group`` of torch.distributed.

    Every rank of the group calls it; all calls after the first return the same group.
    """
    process_group: dist.ProcessGroup = group.device_group  # type: ignore[attr-defined]
    found = _own_groups.get(process_group)
    if found is None:
        ranks = dist.get_process_group_ranks(process_group)
        made = dist.new_group(ranks, backend="hccl", use_local_synchronization=True)
        found = _own_groups[process_group] = TorchGroup(made)
    return found
