"""Cases for a dispatch/combine strategy of the rows format on R real ranks, each checked by each rank alone.

Test data is a pure function of (seed, global token id), so a rank computes the dense answer for its own tokens from
all experts' weights, without communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched, TokenComm
from vllm_ascend_moe.errors import AscendMoEError
from vllm_ascend_moe.experts.activation import activate
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.data import Routing

H, N = 16, 8


@dataclass(frozen=True)
class Case:
    """One forward of one MoE layer. ``sizes`` makes T_r of R ranks."""

    sizes: Callable[[int], list[int]]
    num_experts: int = 8
    top_k: int = 2
    routing: Routing = Routing.UNIFORM
    invalid_share: float = 0.0
    dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32
    placement: str = "linear"
    options: dict[str, Any] = field(default_factory=dict)  # of ReferenceExperts.apply
    bias: bool = False


def uneven(ranks: int) -> list[int]:
    return [(5 * rank + 3) % 7 for rank in range(ranks)]  # 3 1 6 4 2 0 5 3


def with_zeros(ranks: int) -> list[int]:
    return [4 if rank % 2 else 0 for rank in range(ranks)]


def only_the_last(ranks: int) -> list[int]:
    return [0] * (ranks - 1) + [5]


def nothing(ranks: int) -> list[int]:
    return [0] * ranks


def equal(ranks: int) -> list[int]:
    return [3] * ranks


CASES: dict[str, Case] = {
    "uneven": Case(uneven),
    "equal": Case(equal),
    "zero-token ranks": Case(with_zeros),
    "one rank has all tokens": Case(only_the_last),
    "no tokens at all": Case(nothing),
    "1 and 64 tokens": Case(lambda ranks: [1, 64, *[2] * (ranks - 2)]),
    "all to one expert": Case(uneven, routing=Routing.ONE_EXPERT),
    "all to the first experts": Case(uneven, routing=Routing.FIRST_EXPERTS),
    "skewed": Case(uneven, routing=Routing.SKEWED, top_k=4),
    "nothing routed": Case(uneven, routing=Routing.NOWHERE),
    "ids -1 and out of range": Case(uneven, invalid_share=0.5, top_k=4),
    "ids mostly invalid, int64": Case(uneven, invalid_share=0.9, id_dtype=torch.int64),
    "round-robin map": Case(uneven, placement="round_robin", invalid_share=0.2),
    "int64 ids": Case(uneven, id_dtype=torch.int64),
    "bf16": Case(uneven, dtype=torch.bfloat16),
    "fp16": Case(uneven, dtype=torch.float16),
    "bias": Case(uneven, bias=True),
    "no gate": Case(uneven, options={"activation": "gelu_no_mul"}),
    "router weight on input": Case(uneven, options={"apply_router_weight_on_input": True}, top_k=1),
    **{
        f"{experts} experts, {placement}": Case(uneven, num_experts=experts, placement=placement)
        for experts in (3, 5, 7, 30)
        for placement in ("linear", "round_robin")
    },
}


@dataclass(frozen=True)
class Tokens:
    """This rank's part of a case, and everything needed to answer for it."""

    layout: TokenLayout
    hidden: torch.Tensor
    ids: torch.Tensor
    topk_weights: torch.Tensor
    local: list[int]
    all_weights: ExpertWeights

    def map_and_weights(self, case: Case) -> tuple[torch.Tensor, ExpertWeights]:
        weights = {
            name: None if tensor is None else tensor[self.local] for name, tensor in vars(self.all_weights).items()
        }
        return data.expert_map(case.num_experts, self.local), ExpertWeights(**weights)


def make_tokens(case: Case, rank: int, ranks: int) -> Tokens:
    layout = TokenLayout.of(case.sizes(ranks), rank)
    tokens, seed = data.token_ids(layout, rank), 1
    ids = data.topk_ids(
        seed,
        tokens,
        case.top_k,
        case.num_experts,
        case.routing,
        invalid_share=case.invalid_share,
        dtype=case.id_dtype,
    )
    gated = not case.options.get("activation", "silu").endswith("_no_mul")
    return Tokens(
        layout,
        data.hidden_states(seed, tokens, H, case.dtype),
        ids,
        data.topk_weights(seed, tokens, case.top_k),
        data.local_experts(case.num_experts, rank, ranks, case.placement),
        data.expert_weights(seed, range(case.num_experts), H, N, case.dtype, gated=gated, bias=case.bias),
    )


def dense_reference(case: Case, tokens: Tokens) -> torch.Tensor:
    """fp64 [T_r, H]: every expert works on every token; its output counts as often as the token chose it."""
    x, weights = tokens.hidden.double(), tokens.all_weights
    total = torch.zeros_like(x)
    for expert in range(case.num_experts):
        h = x @ weights.w13[expert].double().T
        h = h + (weights.w13_bias[expert].double() if weights.w13_bias is not None else 0)
        y = activate(h, case.options.get("activation", "silu")) @ weights.w2[expert].double().T
        y = y + (weights.w2_bias[expert].double() if weights.w2_bias is not None else 0)
        chosen = (tokens.ids == expert).double()
        on_input = case.options.get("apply_router_weight_on_input", False)
        total += y * (chosen if on_input else chosen * tokens.topk_weights.double()).sum(1, keepdim=True)
    return total


def poison(tokens: Tokens, case: Case) -> Tokens:
    """NaN wherever nothing may be read: weights of invalid choices, and all of a token that is routed nowhere."""
    invalid = (tokens.ids < 0) | (tokens.ids >= case.num_experts)
    return replace(
        tokens,
        topk_weights=tokens.topk_weights.masked_fill(invalid, float("nan")),
        hidden=tokens.hidden.masked_fill(invalid.all(1, keepdim=True), float("nan")),
    )


def poison_pad(dispatched: Dispatched, layout: TokenLayout) -> Dispatched:
    """NaN in the pad rows of what was gathered, as a real buffer may hold."""
    pad = ~layout.valid_rows()[:, None]
    return replace(
        dispatched,
        hidden=dispatched.hidden.masked_fill(pad, float("nan")),
        topk_weights=dispatched.topk_weights.masked_fill(pad, float("nan")),
    )


def run_case(comm: TokenComm, case: Case, rank: int, ranks: int) -> None:
    """Raises AssertionError unless dispatch, reference experts and combine give the dense answer."""
    tokens = make_tokens(case, rank, ranks)
    expert_map, weights = tokens.map_and_weights(case)
    given = poison(tokens, case)
    kept = (given.hidden.clone(), given.topk_weights.clone(), given.ids.clone())
    dispatched = comm.dispatch(
        given.hidden, given.topk_weights, given.ids, num_experts=case.num_experts, layout=tokens.layout
    )
    assert dispatched.format is ActivationFormat.ROWS
    assert dispatched.topk_ids.dtype == case.id_dtype
    assert dispatched.topk_weights.dtype == torch.float32
    poisoned = poison_pad(dispatched, tokens.layout)
    y = ReferenceExperts().apply(
        poisoned.hidden, poisoned.topk_weights, poisoned.topk_ids, weights, expert_map=expert_map, **case.options
    )
    out = comm.combine(y.masked_fill(~tokens.layout.valid_rows()[:, None], float("nan")), dispatched.handle)
    assert out.dtype == case.dtype
    assert_close(out, dense_reference(case, tokens), what=f"rank {rank} of {ranks}")
    nowhere = ((tokens.ids < 0) | (tokens.ids >= case.num_experts)).all(1)
    assert_equal(out[nowhere], torch.zeros_like(out[nowhere]), what="tokens routed nowhere")
    for before, now in zip(kept, (given.hidden, given.topk_weights, given.ids), strict=True):
        assert torch.equal(before.nan_to_num(7), now.nan_to_num(7)), "an input was written to"


def run_markers(comm: TokenComm, sizes: list[int], rank: int) -> None:
    """Rows that hold their global token id: each is where the layout says, and comes back to its own rank."""
    layout = TokenLayout.of(sizes, rank)
    mine = data.token_ids(layout, rank)
    dispatched = comm.dispatch(
        mine[:, None].expand(-1, H).float(),
        mine[:, None].float(),
        mine[:, None].int(),
        num_experts=max(1, layout.num_tokens),
        layout=layout,
    )
    for other in range(layout.ep_size):
        expected = data.token_ids(layout, other)
        here = slice(layout.rows_of(other).start, layout.rows_of(other).stop)
        assert_equal(dispatched.hidden[here], expected[:, None].expand(-1, H).float(), what=f"rows of rank {other}")
        assert_equal(dispatched.topk_ids[here], expected[:, None].int(), what=f"ids of rank {other}")
        assert_equal(dispatched.topk_weights[here], expected[:, None].float(), what=f"weights of rank {other}")
    assert (dispatched.topk_ids[~layout.valid_rows()] == -1).all(), "a pad row has an expert"
    out = comm.combine(dispatched.hidden * (rank == layout.ep_size - 1), dispatched.handle)
    assert_equal(out, mine[:, None].expand(-1, H).float(), what="rows that came back")


SIZE_VECTORS = (uneven, equal, with_zeros, only_the_last, nothing)


def run_all(comm: TokenComm, rank: int, ranks: int) -> dict[str, str]:
    """All cases and marker round trips; by name "ok" or what is wrong.

    A fault of the comparison comes after the collectives, so the ranks stay together and go on with the next case.
    """
    report = {}
    bodies = {name: lambda case=case: run_case(comm, case, rank, ranks) for name, case in CASES.items()}
    for sizes in SIZE_VECTORS:
        bodies[f"markers, {sizes.__name__}"] = lambda sizes=sizes: run_markers(comm, sizes(ranks), rank)
    for name, body in bodies.items():
        try:
            body()
            report[name] = "ok"
        except (AssertionError, AscendMoEError) as error:
            report[name] = f"{type(error).__name__}: {error}"
    return report


NAMES = [*CASES, *(f"markers, {sizes.__name__}" for sizes in SIZE_VECTORS)]
