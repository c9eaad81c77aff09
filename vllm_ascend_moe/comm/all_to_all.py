"""All-to-all by row: a token crosses to each rank that holds one of its experts, once, and to no other.

Symbols: T tokens of this rank; R ranks; K top-k; E experts; H hidden size; S rows this rank sends.
Sent rows are in the order of their destination, then of their token; received ones of their source, then of its token.

A layer costs three collectives (row counts, rows, and the rows' partial sums on the way back) and one host
synchronisation (the counts, which size the other two). The counts also carry the size of a row, or that this rank
refuses its inputs, so that ranks that do not fit together all raise, and none waits for rows that will not come.
Of the layout a rank's own number of tokens is all that matters: what comes from others their counts say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.comm.checks import (
    check_dispatch_inputs,
    check_handle,
    check_placement_experts,
    check_placement_group,
    comm_error,
    group_label,
)
from vllm_ascend_moe.comm.host_read import HostRead
from vllm_ascend_moe.comm.row_plan import look_up, own_ids, owner_table, pack_early, pack_rows, plan_rows, sum_rows
from vllm_ascend_moe.errors import CommError, InvalidValueError, LayoutError, ShapeError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.exchange import all_to_all
from vllm_ascend_moe.ops.native import Group
from vllm_ascend_moe.ops.row_bytes import RowFormat
from vllm_ascend_moe.placement import ExpertPlacement

# In the exchange of counts: the row size is counted in units of this, above every count of rows.
_COUNT_LIMIT = 1 << 32
_REFUSED = -1


@dataclass(frozen=True)
class _Handle:
    """How returned rows become tokens."""

    slots: torch.Tensor  # int32 [T, min(K, R)], the rows of each token; see RowPlan
    send_counts: list[int]  # [R]
    recv_counts: list[int]  # [R]


class AllToAll:
    """The strategy for many ranks with few experts a token. See :class:`~vllm_ascend_moe.comm.base.TokenComm`.

    Experts get one row for each (token, rank) pair, with the ids of that rank's experts alone (others are -1), and give
    back the row's weighted sum. ids below 0, from E on, or of experts on no rank of the group (placement rank -1) are
    not sent; a token without any other gives a zero row.

    Errors: dispatch raises what is wrong with this rank's inputs after telling the other ranks, which raise CommError.
    It so needs them to come too: errors are raised when all ranks are in dispatch. combine has nothing to tell with: a
    rank that raises there leaves the others in their collective until it fails or its timeout ends it.

    Args:
        group: the ranks; see :func:`~vllm_ascend_moe.ops.exchange.all_to_all`.
        placement: where experts live; the same on every rank.
        exact: as for the other strategies, and without effect here: partial sums are always added in fp32, in the order
            of ranks, and rounded once, so that results are those of every exact strategy bit for bit (of the batched
            one given fp32 expert outputs).

    Raises:
        PlacementError: a placement of another number of ranks.
    """

    format = ActivationFormat.ROWS

    def __init__(self, group: Group, placement: ExpertPlacement, *, exact: bool = False) -> None:
        check_placement_group(placement, group)
        self.group, self.placement = group, placement

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
        """Sends hidden [T, H], weights [T, K], ids [T, K] (and scales) of each token to its experts' ranks.

        Returns:
            hidden [rows, H], topk_weights fp32 [rows, K], topk_ids [rows, K] and scales as they were given; rows may
            be strided.

        Raises:
            LayoutError, ShapeError, DtypeError, PlacementError: this rank's inputs do not fit, or ranks' rows differ.
            CommError: another rank refused its inputs, or the backend failed.
        """
        try:
            check_dispatch_inputs(hidden, topk_weights, topk_ids, scales, num_experts, layout, self.group)
            check_placement_experts(self.placement, num_experts)
        except InvalidValueError:
            # Where most inputs are, since one on another device may be what is refused.
            devices = [x.device for x in (hidden, topk_weights, topk_ids)]
            self._refuse(max(devices, key=devices.count))
            raise
        columns = [hidden, topk_weights.to(torch.float32), topk_ids]
        if scales is not None:
            columns.append(scales)
        form = RowFormat.of(columns)
        owners = owner_table(self.placement, topk_ids.device)
        plan = plan_rows(topk_ids, owners, layout.ep_size, form.row_bytes * _COUNT_LIMIT)
        columns[2] = plan.entries
        counts = self._exchange_counts(plan.codes)
        wire = pack_early(plan, form, columns)
        send_counts, recv_counts = self._counts_of(counts, form.row_bytes)
        rows = sum(send_counts)
        wire = pack_rows(plan, form, columns, rows) if wire is None else wire[:rows]
        received = self._all_to_all("dispatch", wire, recv_counts, send_counts)
        views = form.views(received)
        return Dispatched(
            format=self.format,
            hidden=views[0],
            topk_weights=views[1],
            topk_ids=look_up(views[2], own_ids(self.placement, layout.rank, topk_ids.dtype, topk_ids.device)),
            scales=None if scales is None else views[3],
            handle=_Handle(plan.slots, send_counts, recv_counts),
        )

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        """Sends each row's partial sum [rows, H] home and adds them up there in fp32, in the order of ranks.

        Returns:
            [T, H] in the dtype of ``expert_output``.

        Raises:
            ShapeError: another strategy's handle, or not one row for each row of the dispatch.
            CommError: the backend failed.
        """
        check_handle(handle, _Handle)
        assert isinstance(handle, _Handle)
        rows = sum(handle.recv_counts)
        if expert_output.dim() != 2 or expert_output.shape[0] != rows:
            raise ShapeError(
                "expert_output.shape", tuple(expert_output.shape), f"[{rows}, H]", "Pass one row per dispatched row."
            )
        wire = expert_output.contiguous().view(torch.uint8)
        returned = self._all_to_all("combine", wire, handle.send_counts, handle.recv_counts).view(expert_output.dtype)
        return sum_rows(returned, handle.slots)

    # -- parts -------------------------------------------------------------------------------------------------

    def _exchange_counts(self, codes: torch.Tensor) -> HostRead:
        """Sends the codes of the plan, and starts to read those sent here beside them."""
        sent, received = codes.unbind()
        self._all_to_all("exchange of row counts", sent, out=received)
        return HostRead(codes)

    def _counts_of(self, codes: HostRead, row_bytes: int) -> tuple[list[int], list[int]]:
        """Rows to and from each rank, on the host: the layer's one synchronisation."""
        send_codes, recv_codes = codes.wait()
        form = row_bytes * _COUNT_LIMIT
        if min(recv_codes) < form or max(recv_codes) >= form + _COUNT_LIMIT:
            self._raise_mismatch(recv_codes, row_bytes)
        return [code - form for code in send_codes], [code - form for code in recv_codes]

    def _raise_mismatch(self, codes: list[int], row_bytes: int) -> None:
        refused = [rank for rank, code in enumerate(codes) if code == _REFUSED]
        if refused:
            cause = f"ranks {refused} refused their inputs"
            raise CommError("all_to_all", "dispatch", group_label(self.group), cause)
        sizes = {rank: code // _COUNT_LIMIT for rank, code in enumerate(codes)}
        raise LayoutError(
            "bytes of a row, by rank",
            {rank: size for rank, size in sizes.items() if size != row_bytes},
            f"{row_bytes}, as on this rank ({self.group.rank_in_group})",
            "Dispatch the same hidden size, top-k and dtypes on every rank.",
        )

    def _refuse(self, device: torch.device) -> None:
        codes = torch.full((self.group.world_size,), _REFUSED, dtype=torch.int64, device=device)
        self._all_to_all("refusal of inputs", codes)

    def _all_to_all(
        self,
        step: str,
        x: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        try:
            return all_to_all(self.group, x, output_splits, input_splits, out)
        except RuntimeError as error:
            raise comm_error(error, "all_to_all", step, self.group) from error
