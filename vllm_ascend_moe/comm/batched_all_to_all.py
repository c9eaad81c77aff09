"""Dispatch and combine at a fixed capacity: expert-major rows [E_l, C*R, H], every shape known beforehand.

The shape of PPLX and of DeepEP's low-latency mode, on any backend: a step can be captured in a graph and replayed,
since no shape and nothing on the host depends on where tokens are routed.

Symbols: T_r tokens of this rank; R ep_size; C capacity, the most tokens of a rank; K top-k; E experts; E_l local
experts; H hidden size; n = R*C rows received. Every rank has its own E_l; E appears in no buffer's shape.

What crosses. A block of C rows from each rank to each rank, both ways; slot = token index, and rows past T_r carry ids
of -1. On the way out all R blocks of a rank are the same bytes (token, weights, ids, scales side by side), so they
travel as one all-gather: what an all-to-all of R equal blocks gives, without R copies to send, and once for all ranks
of another node. (gloo's ring pays for it with R-1 steps that wait for each other.) On the way back every rank gets
another block, so it is one all-to-all of partial sums, which are added at home in fp32.

What that saves, and what not. Against the padded all-gather the bytes are no fewer: R*C rows both ways, C >= M. What it
gives is fixed shapes (graphs), batched experts, sums in fp32 in a fixed order whatever the backend, and a host that
never waits. Where bytes decide, as with many ranks and long prompts, all-to-all by row sends less.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.comm.batched_rows import block_rows, plan_slots, scatter_rows, slot_table, sum_blocks, sum_slots
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.comm.checks import (
    check_dispatch_inputs,
    check_handle,
    check_placement_experts,
    check_placement_group,
    comm_error,
)
from vllm_ascend_moe.errors import CapacityError, ConfigError, ShapeError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.exchange import all_to_all
from vllm_ascend_moe.ops.native import Group, gather_rows
from vllm_ascend_moe.placement import ExpertPlacement

_PAD_VALUES = (0, 0, -1, 0)  # of hidden, weights, ids, scales: pad rows route nowhere


@dataclass(frozen=True, kw_only=True)
class _Handle:
    layout: TokenLayout
    slots: torch.Tensor  # int32 [n, K]
    weights: torch.Tensor  # fp32 [n, K]
    home_rows: torch.Tensor  # int32 [C, R]


class BatchedAllToAll:
    """The strategy for decode and for graphs. See :class:`~vllm_ascend_moe.comm.base.TokenComm`.

    Experts get unweighted work: ``combine`` weights their outputs. Where the router's weight multiplies the input
    instead, dispatch weights of 1.

    Errors: one that follows from the layout (more tokens than C) every rank raises, before anything is sent. Other
    wrong inputs are an error on the rank that has them alone: the others wait for it in their collective until that
    fails or its timeout ends it.

    Args:
        group: the ranks.
        placement: which rank holds which expert, the same on every rank.
        capacity: C, the same on every rank (:meth:`check_capacity_agrees`).
        buffers: shared by the layers of a group; None: a cache of this object alone. The rows that dispatch returns
            live in it until the next dispatch: run experts and combine before.
        exact: partial sums travel in fp32 and are added in the order of expert slots, as the reference experts do, so
            that fp32 expert outputs give bit for bit what all-to-all by row gives. Twice the bytes back for 16 bits.

    Raises:
        CapacityError: a capacity below 1.
        PlacementError: a placement for another number of ranks.
    """

    format = ActivationFormat.BATCHED

    def __init__(
        self,
        group: Group,
        placement: ExpertPlacement,
        capacity: int,
        *,
        buffers: BufferCache | None = None,
        exact: bool = False,
    ) -> None:
        if capacity < 1:
            raise CapacityError("capacity", capacity, "1 or more", "Set it to the most tokens a rank may have.")
        check_placement_group(placement, group)
        self.group = group
        self.placement = placement
        self.capacity = capacity
        self.buffers = BufferCache() if buffers is None else buffers
        self.exact = exact
        self.num_local = placement.local_counts[group.rank_in_group]
        # Constants by device. A graph keeps their addresses, so they live as long as this object.
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

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
        """Brings hidden [T_r, H] to [E_l, C*R, H], in the order of (source rank, token) for each expert.

        Rows at and past ``expert_num_tokens`` hold old rows or NaN. ``scales`` [T_r, ...] become [E_l, C*R, ...].

        Raises:
            CapacityError: some rank has more than C tokens; on every rank, before anything is sent.
            LayoutError, ShapeError, DtypeError, PlacementError: inputs that do not fit together.
            CommError: the backend failed.
        """
        self._check_capacity(layout)
        check_dispatch_inputs(hidden, topk_weights, topk_ids, scales, num_experts, layout, self.group)
        check_placement_experts(self.placement, num_experts)
        sent = [hidden, topk_weights.to(torch.float32), topk_ids] + ([] if scales is None else [scales])
        rows, weights, ids, *more = self._gather(sent)
        table, home_rows = self._constants_on(hidden.device)
        slots, counts = plan_slots(ids, table, self.num_local)
        batched = self._scatter("tokens by expert", rows, slots)
        batched_scales = self._scatter("scales by expert", more[0], slots) if more else None
        if self.exact:
            # Slots grow with the expert; the sort keeps the order of choices that name the same one.
            slots, order = slots.sort(dim=1, stable=True)
            weights = weights.gather(1, order)
        return Dispatched(
            format=self.format,
            hidden=batched,
            expert_num_tokens=counts,
            scales=batched_scales,
            handle=_Handle(layout=layout, slots=slots, weights=weights, home_rows=home_rows),
        )

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        """Weights and sums expert outputs [E_l, C*R, H] and brings them home: [T_r, H], in their dtype, a new tensor.

        Slots that no token has are not used, whatever they hold.

        Raises:
            ShapeError: another strategy's handle, or outputs of another shape. CommError: the backend failed.
        """
        check_handle(handle, _Handle)
        assert isinstance(handle, _Handle)
        ranks, capacity, tokens = self.group.world_size, self.capacity, handle.layout.local_size
        if expert_output.dim() != 3 or expert_output.shape[:2] != (self.num_local, ranks * capacity):
            raise ShapeError(
                "expert_output.shape",
                tuple(expert_output.shape),
                f"[E_l = {self.num_local}, C*R = {ranks * capacity}, H]",
                "Pass what the experts made of the dispatched rows, unweighted.",
            )
        size, dtype, device = expert_output.shape[2], expert_output.dtype, expert_output.device
        outputs = expert_output.contiguous().view(-1, size)
        if ranks == 1:
            result = torch.empty((tokens, size), dtype=dtype, device=device)
            sum_slots(outputs, handle.slots[:tokens], handle.weights[:tokens], result)
            return result
        wire = torch.promote_types(dtype, torch.float32) if self.exact else dtype
        partial = self.buffers.get("partial sums", (ranks * capacity, size), wire, device)
        sum_slots(outputs, handle.slots, handle.weights, partial)
        blocks = self._exchange(partial).view(ranks, capacity, size)
        return sum_blocks(blocks, handle.home_rows[:tokens], dtype, in_order=self.exact)

    def check_capacity_agrees(self, device: torch.device | str | None = None) -> None:
        """Compares capacity, placement and ``exact`` of all ranks in one collective. Call it once, on every rank.

        Args:
            device: where the group's collectives work; None: CPU for gloo, else the current accelerator.

        Raises:
            CapacityError: ranks have different capacities. ConfigError: they differ in something else.
            Both on every rank.
        """
        placed = hashlib.sha256(repr((self.placement.ranks, self.placement.slots)).encode()).digest()
        mine = [self.capacity, int.from_bytes(placed[:7], "big"), int(self.exact)]
        where = _device_of(self.group) if device is None else device
        ranks = self.group.all_gather(torch.tensor([mine], dtype=torch.int64, device=where), 0).tolist()
        capacities, placements, exact = zip(*ranks, strict=True)
        if len(set(capacities)) > 1:
            raise CapacityError(
                "capacity by rank", list(capacities), "equal", "Give every rank the same configuration."
            )
        for name, values in (("placement", placements), ("exact", exact)):
            if len(set(values)) > 1:
                raise ConfigError(
                    f"{name} by rank", list(values), "equal", "Give every rank the same model and configuration."
                )

    def _check_capacity(self, layout: TokenLayout) -> None:
        if layout.max_local_size > self.capacity:
            raise CapacityError(
                "layout.max_local_size",
                layout.max_local_size,
                f"at most the capacity, {self.capacity} tokens a rank",
                "Raise max_tokens_across_dp, send fewer tokens a step, or use another strategy for steps of this size.",
            )

    def _gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """[T_r, ...] -> [n, ...] each, rank after rank, C rows of each; strided views of one buffer."""
        values = _PAD_VALUES[: len(tensors)]
        try:
            return gather_rows(tensors, values, self.capacity, self.group, packed=True)
        except RuntimeError as error:
            raise comm_error(error, "batched_all_to_all", "dispatch", self.group) from error

    def _exchange(self, partial: torch.Tensor) -> torch.Tensor:
        """Block r of C rows goes to rank r; block r of the result came from it."""
        try:
            return all_to_all(self.group, partial)
        except RuntimeError as error:
            raise comm_error(error, "batched_all_to_all", "combine", self.group) from error

    def _constants_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._constants.get(device)
        if found is None:
            with torch.inference_mode(False):
                experts = self.placement.expert_map(self.group.rank_in_group, device)
                rows = block_rows(self.group.world_size, self.capacity, device)
                found = self._constants[device] = (slot_table(experts, self.num_local), rows)
        return found

    def _scatter(self, name: str, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [E_l, n, ...] in the cached buffer of this name, which has one more row; see scatter_rows."""
        shape = rows.shape[1:]
        buffer = self.buffers.get(name, (self.num_local * rows.shape[0] + 1, *shape), rows.dtype, rows.device)
        scatter_rows(rows, slots, buffer)
        return buffer[:-1].view(self.num_local, rows.shape[0], *shape)


def _device_of(group: Group) -> torch.device:
    process_group = getattr(group, "device_group", None)
    if not isinstance(process_group, dist.ProcessGroup) or dist.get_backend(process_group) == "gloo":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else found
