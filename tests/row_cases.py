"""Routings of the all-to-all by row, for tests of its kernels on the CPU (interpreter) and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from vllm_ascend_moe.comm import batched_rows, row_plan
from vllm_ascend_moe.ops.row_bytes import RowFormat
from vllm_ascend_moe.placement import ExpertPlacement

Result = TypeVar("Result")


def in_form(form: str, call: Callable[[], Result]) -> Result:
    """The result of a call whose rows are handled in this form."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (row_plan, batched_rows):  # plain torch adds plain sums too
            patch.setattr(module, "form_on", lambda device_type: form)
        row_plan.owner_table.cache_clear()  # tables differ between forms
        try:
            return call()
        finally:
            row_plan.owner_table.cache_clear()


@dataclass(frozen=True)
class Routed:
    """Tokens of one rank and where experts live."""

    ids: torch.Tensor
    placement: ExpertPlacement

    @staticmethod
    def random(
        tokens: int,
        topk: int,
        placement: ExpertPlacement,
        dtype: torch.dtype = torch.int32,
        strided: str = "rows",
        seed: int = 0,
        device: str = "cpu",
    ) -> Routed:
        """Ids that repeat, and some out of range by one and by much; rows, or rows and columns, apart in memory."""
        generator, experts = torch.Generator().manual_seed(seed), placement.num_experts
        ids = torch.randint(-2, experts + 2, (tokens, topk), generator=generator, dtype=dtype)
        far = torch.rand((tokens, topk), generator=generator) < 0.05
        largest = torch.iinfo(dtype).max
        ids = torch.where(far, torch.where(ids % 2 == 0, largest, -largest - 1), ids).to(device)
        if strided == "both":
            ids = ids.repeat_interleave(2, 1)[:, ::2]
        elif strided == "rows":
            ids = torch.cat([ids, ids.flip(1), ids[:, :1]], 1)[:, :topk]
        return Routed(ids, placement)

    def plan(self, code: int = 0) -> row_plan.RowPlan:
        owners = row_plan.owner_table(self.placement, self.ids.device)
        return row_plan.plan_rows(self.ids, owners, self.placement.ep_size, code)

    def columns(self, dtype: torch.dtype, hidden_size: int, scales: tuple[int, ...] | None) -> list[torch.Tensor]:
        """hidden with rows apart, weights, and perhaps scales of this shape, with numbers that tell rows apart."""
        (tokens, topk), device = self.ids.shape, self.ids.device
        generator = torch.Generator().manual_seed(1)
        wide = torch.randint(0, 100, (tokens, 2, hidden_size), generator=generator).to(device).to(dtype)
        columns = [wide[:, 1], torch.rand((tokens, topk), generator=generator).to(device)]
        if scales is not None:
            columns.append(torch.rand((tokens, *scales), generator=generator).to(device))
        return columns


def _all_alike(ids: list[int], tokens: int, experts: int, ranks: int) -> Routed:
    return Routed(torch.tensor([ids] * tokens, dtype=torch.int32), ExpertPlacement.linear(experts, ranks))


HARD: dict[str, Callable[[], Routed]] = {
    "no tokens": lambda: Routed(torch.empty((0, 2), dtype=torch.int64), ExpertPlacement.linear(4, 2)),
    "one token": lambda: _all_alike([3, 0, 2], 1, 4, 4),
    "no choices": lambda: Routed(torch.empty((5, 0), dtype=torch.int32), ExpertPlacement.linear(4, 2)),
    "all to the last rank": lambda: _all_alike([7, 6, 7], 40, 8, 4),
    "all to rank 0, each choice the same expert": lambda: _all_alike([0] * 5, 40, 8, 4),
    "nothing is routed": lambda: _all_alike([-1, 8, 99], 40, 8, 4),
    "a token to every rank, in falling order": lambda: _all_alike([7, 5, 3, 1], 40, 8, 4),
    "one rank": lambda: Routed.random(33, 3, ExpertPlacement.linear(5, 1)),
    "32 choices of 256 ranks": lambda: Routed.random(20, 32, ExpertPlacement.linear(512, 256)),
    "more choices than ranks": lambda: Routed.random(30, 11, ExpertPlacement.linear(9, 3)),
    "ranks without experts": lambda: Routed.random(30, 4, ExpertPlacement.of([5, 5, 2, -1], 7)),
}


def whole_layer(sizes: list[int], with_scales: bool, device: str = "cpu") -> list[torch.Tensor]:
    """What arrives on each rank, and each rank's sums, where experts double their rows; ranks take turns here."""
    ranks = len(sizes)
    placement = ExpertPlacement.of([e % ranks if e != 2 else -1 for e in range(7)], ranks)
    plans, blocks, form = [], [], None
    for rank, tokens in enumerate(sizes):
        case = Routed.random(tokens, 3, placement, torch.int64, seed=rank, device=device)
        columns = case.columns(torch.bfloat16, 24, () if with_scales else None)
        plan = case.plan()
        columns.insert(2, plan.entries)
        form = RowFormat.of(columns)
        counts = plan.codes[0].tolist()
        plans.append(plan)
        blocks.append(row_plan.pack_rows(plan, form, columns, sum(counts)).split(counts))
    assert form is not None
    results, back = [], []
    for rank in range(ranks):
        views = form.views(torch.cat([block[rank] for block in blocks]))
        ids = row_plan.look_up(views[2], row_plan.own_ids(placement, rank, torch.int64, views[2].device))
        results += [views[0], views[1], ids, *views[3:]]
        back.append((views[0] * 2).split([len(block[rank]) for block in blocks]))
    for rank, plan in enumerate(plans):
        results.append(row_plan.sum_rows(torch.cat([block[rank] for block in back]), plan.slots))
    return results
