"""What a dispatch by row must deliver, spelled out token by token; whole layers against the dense answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import strategy_cases
import torch
from strategy_cases import Case, Tokens, dense_reference, make_tokens, poison

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal


@dataclass(frozen=True)
class Rows:
    """Rows of tokens."""

    hidden: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def all_tokens(case: Case, ranks: int) -> Rows:
    """All ranks' tokens in rank order, NaN where nothing may be read."""
    layout = TokenLayout.of(case.sizes(ranks), 0)
    tokens = torch.arange(layout.num_tokens)
    routing = (case.top_k, case.num_experts, case.routing)
    ids = data.topk_ids(1, tokens, *routing, invalid_share=case.invalid_share, dtype=case.id_dtype)
    invalid = (ids < 0) | (ids >= case.num_experts)
    hidden = data.hidden_states(1, tokens, strategy_cases.H, case.dtype)
    weights = data.topk_weights(1, tokens, case.top_k)
    nan = float("nan")
    return Rows(hidden.masked_fill(invalid.all(1, keepdim=True), nan), weights.masked_fill(invalid, nan), ids)


def expected_rows(case: Case, placement: ExpertPlacement, rank: int) -> Rows:
    """What must arrive on ``rank``: tokens of every rank, in order, that have an expert here; other ids are -1."""
    tokens = all_tokens(case, placement.ep_size)
    here, masked = [], []
    for row, ids in enumerate(tokens.topk_ids.tolist()):
        chosen = [e if 0 <= e < case.num_experts and placement.ranks[e] == rank else -1 for e in ids]
        if max(chosen) >= 0:
            here.append(row)
            masked.append(chosen)
    ids = torch.tensor(masked, dtype=case.id_dtype).view(-1, case.top_k)
    return Rows(tokens.hidden[here], tokens.topk_weights[here], ids)


def placement_of(case: Case, ranks: int) -> ExpertPlacement:
    return getattr(ExpertPlacement, case.placement)(case.num_experts, ranks)


def dispatch(comm: AllToAll, case: Case, tokens: Tokens) -> Dispatched:
    return comm.dispatch(
        tokens.hidden, tokens.topk_weights, tokens.ids, num_experts=case.num_experts, layout=tokens.layout
    )


def check_rows(dispatched: Dispatched, expected: Rows) -> None:
    assert dispatched.format is ActivationFormat.ROWS
    assert dispatched.scales is None
    for name in ("hidden", "topk_weights", "topk_ids"):
        # NaN of choices that live elsewhere travels with its row, and compares as a number here.
        assert_equal(getattr(dispatched, name).nan_to_num(77), getattr(expected, name).nan_to_num(77), what=name)


def on(case: Case, ranks: int) -> Case:
    """The case for this number of ranks; some size vectors are made for two and more."""
    alone = ranks == 1 and case.sizes is not strategy_cases.nothing
    return replace(case, sizes=lambda _: [6]) if alone else case


def run_case(comm: AllToAll, case: Case, rank: int, ranks: int) -> None:
    """Raises AssertionError unless each row arrives where it must, and the layer gives the dense answer."""
    tokens = make_tokens(case, rank, ranks)
    given = poison(tokens, case)
    kept = (given.hidden.clone(), given.topk_weights.clone(), given.ids.clone())
    dispatched = dispatch(comm, case, given)
    check_rows(dispatched, expected_rows(case, comm.placement, rank))
    mine = comm.placement.experts_of(rank)
    weights = replace(tokens, local=mine).map_and_weights(case)[1]
    y = ReferenceExperts().apply(
        dispatched.hidden,
        dispatched.topk_weights,
        dispatched.topk_ids,
        weights,
        expert_map=comm.placement.expert_map(rank),
        **case.options,
    )
    out = comm.combine(y, dispatched.handle)
    assert out.dtype == case.dtype
    assert_close(out, dense_reference(case, tokens), what=f"rank {rank} of {ranks}")
    nowhere = ((tokens.ids < 0) | (tokens.ids >= case.num_experts)).all(1)
    assert_equal(out[nowhere], torch.zeros_like(out[nowhere]), what="tokens routed nowhere")
    for before, now in zip(kept, (given.hidden, given.topk_weights, given.ids), strict=True):
        assert torch.equal(before.nan_to_num(7), now.nan_to_num(7)), "an input was written to"


CASES: dict[str, Case] = {
    **strategy_cases.CASES,
    "one token": Case(lambda ranks: [0] * (ranks - 1) + [1]),
    "many experts a token": Case(strategy_cases.uneven, top_k=8, invalid_share=0.3),
    "one expert in all": Case(strategy_cases.uneven, num_experts=1, top_k=1),
}
