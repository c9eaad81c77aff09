"""Cases that every strategy must answer alike: drawn ones, the same on every rank, and a rank's tokens of a case.

Symbols: T_r tokens of rank r; H hidden size; K top-k; E experts; C capacity. Spawned processes import this module.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.data import Routing

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One forward of one layer on R = len(sizes) ranks; the same object on every rank."""

    sizes: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 8
    placement: str | tuple[int, ...] = "linear"  # or the rank of every expert
    dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32
    routing: Routing = Routing.UNIFORM
    ids: tuple[tuple[int, ...], ...] | None = None  # of all tokens, rank after rank, instead of the routing
    invalid_share: float = 0.0
    twice: bool = False  # every token names its first expert twice
    payload: str | None = None
    slack: int = 0  # C - max(T_r)
    seed: int = 0

    def placed(self) -> ExpertPlacement:
        if isinstance(self.placement, tuple):
            return ExpertPlacement.of(self.placement, len(self.sizes))
        return getattr(ExpertPlacement, self.placement)(self.num_experts, len(self.sizes))


# -- drawing ---------------------------------------------------------------------------------------------------


def draw(ranks: int, count: int) -> list[Case]:
    """The same cases for the same arguments: the parent draws, every rank gets the list."""
    rng = random.Random(f"{count} cases of {ranks} ranks")
    return [_draw_one(rng, ranks, seed) for seed in range(count)]


def _draw_one(rng: random.Random, ranks: int, seed: int) -> Case:
    experts = rng.choice([1, 2, 3, 5, 7, 8, 16, 30])
    placement: Any = rng.choice(["linear", "round_robin", tuple(rng.randrange(ranks) for _ in range(experts))])
    return Case(
        sizes=_draw_sizes(rng, ranks),
        num_experts=experts,
        top_k=rng.randint(1, min(experts, 6)),
        hidden_size=rng.choice([1, 7, 16]),
        placement=placement,
        dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]),
        id_dtype=rng.choice([torch.int32, torch.int64]),
        routing=rng.choice(list(Routing)),
        invalid_share=rng.choice([0.0, 0.0, 0.3, 0.9]),
        twice=rng.random() < 0.2,
        payload=(None, "int8", "fp8")[seed % 3],
        slack=rng.choice([0, 0, 1, 5]),
        seed=seed,
    )


def _draw_sizes(rng: random.Random, ranks: int) -> tuple[int, ...]:
    kind = rng.choice(["any", "any", "idle", "one", "equal", "none"])
    if kind == "one":
        sizes = [0] * ranks
        sizes[rng.randrange(ranks)] = rng.choice([1, 33])
        return tuple(sizes)
    if kind in ("equal", "none"):
        return (rng.randint(1, 6) if kind == "equal" else 0,) * ranks
    return tuple(rng.choice([0, 0, 1]) if kind == "idle" else rng.randint(0, 12) for _ in range(ranks))


# -- a rank's tokens -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    layout: TokenLayout
    hidden: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor

    @staticmethod
    def of(case: Case, rank: int) -> Tokens:
        """NaN in weights of choices that are not routed, and throughout tokens that have no other."""
        layout = TokenLayout.of(case.sizes, rank)
        tokens = data.token_ids(layout, rank)
        if case.ids is not None:
            ids = torch.tensor(case.ids, dtype=case.id_dtype)[tokens]
        else:
            ids = data.topk_ids(
                case.seed,
                tokens,
                case.top_k,
                case.num_experts,
                case.routing,
                invalid_share=case.invalid_share,
                dtype=case.id_dtype,
            )
        if case.twice:
            ids[:, -1] = ids[:, 0]
        invalid = (ids < 0) | (ids >= case.num_experts)
        hidden = data.hidden_states(case.seed, tokens, case.hidden_size, case.dtype) * 3
        weights = data.topk_weights(case.seed, tokens, case.top_k)
        return Tokens(
            layout,
            hidden.masked_fill(invalid.all(1, keepdim=True), NAN),
            weights.masked_fill(invalid, NAN),
            ids,
        )

    def nowhere(self, num_experts: int) -> torch.Tensor:
        return ((self.ids < 0) | (self.ids >= num_experts)).all(1)
