"""All-to-all by row: a token crosses to each rank that holds one of its experts, once, and to no other.

Symbols: T tokens of this rank; R ranks; K top-k; E experts; H hidden size; S rows this rank sends.
Sent rows are in the order of their destination, then of their token; received ones of their source, then of its token.

A layer costs three collectives (row counts, rows, and the rows' partial sums on the way back) and one host
synchronisation (the counts, which size the other two). The counts also carry the size of a row, or that this rank
refuses its inputs, so that ranks that do not fit together all raise, and none waits for rows that will not come.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
    """How returned rows become tokens: token t is the sum of rows order[starts[t]:starts[t + 1]]."""

    order: torch.Tensor  # int64 [S]
    starts: torch.Tensor  # int64 [T]
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
        exact: sum in fp32 and round once to the output's dtype, to nearest even, so that the result is the same bit for
            bit as of every other exact strategy. Without it, kernels of some devices round ties otherwise.

    Raises:
        PlacementError: a placement of another number of ranks.
    """

    format = ActivationFormat.ROWS

    def __init__(self, group: Group, placement: ExpertPlacement, *, exact: bool = False) -> None:
        check_placement_group(placement, group)
        self.group, self.placement, self.exact = group, placement, exact

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
            self._refuse(topk_ids.device)
            raise
        # Ids become indices into tables whose first and last entries stand for ids outside [0, E).
        index = topk_ids.clamp(-1, num_experts) + 1
        sent = self._destinations(index)
        columns = [hidden, topk_weights.to(torch.float32), index]
        if scales is not None:
            columns.append(scales)
        form = RowFormat.of(columns)
        sizes = self._exchange_sizes(sent.sum(1) + form.row_bytes * _COUNT_LIMIT)
        ends = sent.flatten().cumsum(0)
        per_token = sent.sum(0)
        starts = per_token.cumsum(0) - per_token
        send_counts, recv_counts = self._read_sizes(sizes, form.row_bytes, layout)
        # The n-th set bit of `sent`, by destination and then by token, is where the running count reaches n.
        places = torch.searchsorted(ends, torch.arange(1, sum(send_counts) + 1, device=ends.device))
        tokens = places % max(1, layout.local_size)
        received = self._all_to_all("dispatch", form.select(columns, tokens), recv_counts, send_counts)
        views = form.views(received)
        return Dispatched(
            format=self.format,
            hidden=views[0],
            topk_weights=views[1],
            topk_ids=self._own_ids(views[2]),
            scales=None if scales is None else views[3],
            handle=_Handle(tokens.argsort(stable=True), starts, send_counts, recv_counts),
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
        # A bag is a token: torch's kernels read its rows alone, one after the other, and accumulate in fp32 or wider.
        values = returned.to(torch.promote_types(returned.dtype, torch.float32)) if self.exact else returned
        return torch.embedding_bag(values, handle.order, handle.starts)[0].to(expert_output.dtype)

    # -- parts -------------------------------------------------------------------------------------------------

    def _destinations(self, index: torch.Tensor) -> torch.Tensor:
        """bool [R, T]: which tokens go to which rank."""
        owners = _owner_table(self.placement, index.device).index_select(0, index.flatten()).view(index.shape)
        sent = torch.zeros((self.placement.ep_size + 1, index.shape[0]), dtype=torch.bool, device=index.device)
        return sent.scatter_(0, owners.t(), True)[:-1]

    def _own_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Received indices as global ids; -1 for ids of other ranks' experts."""
        table = _own_table(self.placement, self.group.rank_in_group, index.dtype, index.device)
        return table.index_select(0, index.flatten()).view(index.shape)

    def _exchange_sizes(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [2, R]: the codes sent to and received from each rank."""
        received = self._all_to_all("exchange of row counts", codes)
        return torch.stack((codes, received))

    def _read_sizes(self, sizes: torch.Tensor, row_bytes: int, layout: TokenLayout) -> tuple[list[int], list[int]]:
        """Rows to and from each rank, on the host: the layer's one synchronisation."""
        send_counts, recv_counts = (sizes - row_bytes * _COUNT_LIMIT).tolist()
        if min(recv_counts) < 0 or max(recv_counts) > layout.max_local_size:
            self._raise_mismatch([count + row_bytes * _COUNT_LIMIT for count in recv_counts], row_bytes, layout)
        return send_counts, recv_counts

    def _raise_mismatch(self, codes: list[int], row_bytes: int, layout: TokenLayout) -> None:
        refused = [rank for rank, code in enumerate(codes) if code == _REFUSED]
        if refused:
            cause = f"ranks {refused} refused their inputs"
            raise CommError("all_to_all", "dispatch", group_label(self.group), cause)
        sizes = {rank: code // _COUNT_LIMIT for rank, code in enumerate(codes)}
        other = {rank: size for rank, size in sizes.items() if size != row_bytes}
        if other:
            raise LayoutError(
                "bytes of a row, by rank",
                other,
                f"{row_bytes}, as on this rank ({self.group.rank_in_group})",
                "Dispatch the same hidden size, top-k and dtypes on every rank.",
            )
        raise LayoutError(
            "rows, by rank",
            [code % _COUNT_LIMIT for code in codes],
            f"at most max_local_size = {layout.max_local_size}",
            "Build every rank's layout from the same token counts.",
        )

    def _refuse(self, device: torch.device) -> None:
        codes = torch.full((self.group.world_size,), _REFUSED, dtype=torch.int64, device=device)
        self._all_to_all("refusal of inputs", codes)

    def _all_to_all(
        self, step: str, x: torch.Tensor, output_splits: list[int] | None = None, input_splits: list[int] | None = None
    ) -> torch.Tensor:
        try:
            return all_to_all(self.group, x, output_splits, input_splits)
        except RuntimeError as error:
            raise comm_error(error, "all_to_all", step, self.group) from error


@lru_cache(maxsize=64)
def _owner_table(placement: ExpertPlacement, device: torch.device) -> torch.Tensor:
    """int64 [E + 2]: the rank of expert e at e + 1; R where it is on no rank, and for the two ends."""
    owners = torch.tensor((-1, *placement.ranks, -1), device=device)
    return torch.where(owners < 0, placement.ep_size, owners)


@lru_cache(maxsize=64)
def _own_table(placement: ExpertPlacement, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[E + 2]: e at e + 1 where expert e lives on ``rank``, else -1."""
    ids = [expert if owner == rank else -1 for expert, owner in enumerate(placement.ranks)]
    return torch.tensor((-1, *ids, -1), dtype=dtype, device=device)
