"""Cases that every strategy must answer alike, and what each rank does with them. Spawned processes import this module.

Two kinds of experts. *Simple* ones, ``x * gain + shift`` in fp32, give the same bits however rows are batched, so that
in exact mode the sum over experts, in the order of ranks and slots, is known bit for bit. *MLP* ones are the reference
experts, compared within the dtype's bounds with the same experts on this rank's own tokens, without communication.

Symbols: T_r tokens of rank r; H hidden size; K top-k; E experts; C capacity.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched, TokenComm
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.comm.payload import QuantizedDispatch, dequantize_tokens, quantize_tokens
from vllm_ascend_moe.errors import AscendMoEError
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.counting_group import CountingGroup
from vllm_ascend_moe.testing.data import Routing

N = 8
READ_AS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
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


# -- a rank's tokens and experts -------------------------------------------------------------------------------


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


class SimpleExperts:
    """fp32 ``x * gain + shift``, in both formats; every operation is one element's own."""

    def __init__(self, case: Case) -> None:
        experts = torch.arange(case.num_experts)
        self.gain = data.hidden_states(case.seed + 1, experts, case.hidden_size, torch.float32)
        self.shift = data.hidden_states(case.seed + 2, experts, case.hidden_size, torch.float32)

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return x.float() * self.gain[expert] + self.shift[expert]

    def rows(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, local: list[int]) -> torch.Tensor:
        """fp32 [rows, H]: of each row the weighted sum of its experts among ``local``, in their order."""
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in local:
            y = self.one(expert, x)
            for k in range(ids.shape[1]):
                here = ids[:, k] == expert
                total[here] += y[here] * weights[here, k, None]
        return total

    def batched(self, x: torch.Tensor, counts: torch.Tensor, local: list[int], scales: torch.Tensor | None) -> Any:
        out = torch.full(x.shape, NAN, dtype=torch.float32)
        for slot, expert in enumerate(local):
            mine = x[slot, : counts[slot]]
            if scales is not None:
                mine = dequantize_tokens(mine, scales[slot, : counts[slot]], torch.float32)
            out[slot, : counts[slot]] = self.one(expert, mine)
        return out

    def expected(self, hidden: torch.Tensor, tokens: Tokens, placement: ExpertPlacement) -> torch.Tensor:
        """fp32 [T_r, H]: each rank's sum over its experts, then the ranks' sums in the order of ranks."""
        total = torch.zeros(hidden.shape, dtype=torch.float32)
        for rank in range(placement.ep_size):
            total += self.rows(hidden, tokens.weights, tokens.ids, placement.experts_of(rank))
        return total

    def reach(self, tokens: Tokens, per_element: torch.Tensor) -> torch.Tensor:
        """fp64 [T_r, H]: how far the result moves at most where each element moves by ``per_element``."""
        total = torch.zeros(per_element.shape, dtype=torch.float64)
        for expert in range(self.gain.shape[0]):
            for k in range(tokens.ids.shape[1]):
                weight = torch.where(tokens.ids[:, k] == expert, tokens.weights[:, k], 0).double()
                total += weight[:, None] * self.gain[expert].double().abs() * per_element
        return total


class MlpExperts:
    """The reference experts in the case's dtype."""

    def __init__(self, case: Case) -> None:
        self.all = data.expert_weights(case.seed, range(case.num_experts), case.hidden_size, N, case.dtype)

    def local(self, experts: list[int]) -> ExpertWeights:
        return ExpertWeights(w13=self.all.w13[experts], w2=self.all.w2[experts])


# -- one strategy, one case ------------------------------------------------------------------------------------


def strategies(case: Case, group: Any, *, exact: bool) -> dict[str, TokenComm]:
    placement, capacity = case.placed(), max(1, max(case.sizes) + case.slack)
    return {
        "padded_allgather": PaddedAllGather(group, packed_bytes=case.seed % 2 << 30, exact=exact),
        "all_to_all": AllToAll(group, placement, exact=exact),
        "batched_all_to_all": BatchedAllToAll(group, placement, capacity, exact=exact),
    }


def exchange(
    comm: TokenComm, case: Case, tokens: Tokens, rank: int, work: Callable[[Dispatched, list[int]], torch.Tensor]
) -> torch.Tensor:
    """Dispatch, experts on rows with NaN wherever nothing may be read, and combine of the same."""
    local = case.placed().experts_of(rank)
    kept = [x.clone() for x in (tokens.hidden, tokens.weights, tokens.ids)]
    sent = comm.dispatch(tokens.hidden, tokens.weights, tokens.ids, num_experts=case.num_experts, layout=tokens.layout)
    if sent.format is ActivationFormat.BATCHED:
        unused = torch.arange(sent.hidden.shape[1]) >= sent.expert_num_tokens[:, None]
        capacity = max(1, max(case.sizes) + case.slack)
        assert sent.hidden.shape == (len(local), capacity * len(case.sizes), case.hidden_size)
        assert sent.expert_num_tokens.dtype == torch.int32
    else:
        assert sent.topk_ids.dtype == case.id_dtype
        assert sent.topk_weights.dtype == torch.float32
        unused = ~torch.isin(sent.topk_ids, torch.tensor(local, dtype=case.id_dtype)).any(1)
        sent = replace(sent, topk_weights=sent.topk_weights.masked_fill(unused[:, None], NAN))
    if sent.scales is None:
        assert sent.hidden.dtype == case.dtype
        sent = replace(sent, hidden=sent.hidden.masked_fill(unused[..., None], NAN))
    else:
        sent = replace(sent, scales=sent.scales.masked_fill(unused, NAN))
    y = work(sent, local)
    if isinstance(getattr(comm, "inner", comm), PaddedAllGather):
        y = y.masked_fill(~tokens.layout.valid_rows()[:, None], NAN)
    out = comm.combine(y, sent.handle)
    for before, now in zip(kept, (tokens.hidden, tokens.weights, tokens.ids), strict=True):
        assert torch.equal(before.nan_to_num(7), now.nan_to_num(7)), "an input was written to"
    return out


def run_simple(case: Case, rank: int, group: Any) -> None:
    """Exact mode: every strategy gives the bits of the ordered sum, with the case's payload."""
    tokens, experts, placement = Tokens.of(case, rank), SimpleExperts(case), case.placed()

    def work(sent: Dispatched, local: list[int]) -> torch.Tensor:
        if sent.format is ActivationFormat.BATCHED:
            return experts.batched(sent.hidden, sent.expert_num_tokens, local, sent.scales)
        return experts.rows(sent.hidden, sent.topk_weights, sent.topk_ids, local)

    plain = experts.expected(tokens.hidden, tokens, placement)
    for name, comm in strategies(case, group, exact=True).items():
        for hand_on in (False, True) if case.payload and comm.format is ActivationFormat.BATCHED else (False,):
            arrives, used = tokens.hidden, comm
            if case.payload is not None:
                used = QuantizedDispatch(comm, case.payload, dequantize=not hand_on)
                arrives = there_and_back(tokens.hidden, case.payload, torch.float32 if hand_on else case.dtype)
            out = exchange(used, case, tokens, rank, work)
            what = f"{name}, payload {case.payload}" + (", handed on" if hand_on else "")
            assert_equal(out, experts.expected(arrives, tokens, placement), what=what)
            if case.payload is not None:
                check_bound(out, plain, experts, tokens, case, what)


def there_and_back(x: torch.Tensor, payload: str, dtype: torch.dtype) -> torch.Tensor:
    values, scales = quantize_tokens(x, payload)
    return dequantize_tokens(values.view(READ_AS[payload]), scales, dtype)


def check_bound(
    out: torch.Tensor, plain: torch.Tensor, experts: SimpleExperts, tokens: Tokens, case: Case, what: str
) -> None:
    """The error of each element, against what rounding of its token can do to it."""
    x = tokens.hidden.double().nan_to_num(0)
    scale = x.abs().amax(1, keepdim=True) / {"int8": 127, "fp8": 448}[case.payload]
    step = scale / 2 if case.payload == "int8" else torch.maximum(x.abs() / 16, scale / 1024)
    step = step + x.abs() * torch.finfo(case.dtype).eps  # of the type it comes back in
    off = (out.double() - plain.double()).abs() - experts.reach(tokens, step) - plain.double().abs() * 1e-5 - 1e-6
    assert off.numel() == 0 or off.max() <= 0, f"{what}: {off.max():.3g} above the bound"


def run_mlp(case: Case, rank: int, group: Any) -> None:
    """As the engine runs it: within the dtype's bound of the same experts without communication."""
    tokens, experts = Tokens.of(case, rank), MlpExperts(case)
    expert_map = case.placed().expert_map(rank)

    def work(sent: Dispatched, local: list[int]) -> torch.Tensor:
        weights, reference = experts.local(local), ReferenceExperts()
        if sent.format is ActivationFormat.BATCHED:
            return reference.apply_batched(sent.hidden, sent.expert_num_tokens, weights)
        return reference.apply(sent.hidden, sent.topk_weights, sent.topk_ids, weights, expert_map=expert_map)

    dense = ReferenceExperts().apply(tokens.hidden.double(), tokens.weights.double(), tokens.ids, experts.all)
    nowhere = tokens.nowhere(case.num_experts)
    for name, comm in strategies(case, group, exact=False).items():
        out = exchange(comm, case, tokens, rank, work)
        assert out.dtype == case.dtype
        assert_close(out, dense, what=name)
        assert_equal(out[nowhere], torch.zeros_like(out[nowhere]), what=f"{name}, tokens routed nowhere")


# -- bytes -----------------------------------------------------------------------------------------------------

TRAFFIC = {"num_experts": 64, "top_k": 6, "hidden_size": 1024, "dtype": torch.bfloat16}


def count_bytes(group: TorchGroup, rank: int) -> dict[tuple[str, str | None], tuple[int, int, int]]:
    """By strategy and payload: bytes out and back and collectives, as handed to them by this rank."""
    found = {}
    counting = CountingGroup(group)
    for payload in (None, "int8", "fp8"):
        case = Case((150,) * group.world_size, payload=payload, seed=1, **TRAFFIC)
        tokens = Tokens.of(case, rank)
        for name, comm in strategies(case, counting, exact=False).items():
            used = comm if payload is None else QuantizedDispatch(comm, payload)
            counting.reset()
            sent = used.dispatch(
                tokens.hidden, tokens.weights, tokens.ids, num_experts=case.num_experts, layout=tokens.layout
            )
            out = counting.bytes.total()
            used.combine(torch.zeros(sent.hidden.shape, dtype=case.dtype), sent.handle)
            found[name, payload] = (out, counting.bytes.total() - out, counting.calls.total())
    return found


def run_all(rank: int, ranks: int, cases: dict[str, Case]) -> tuple[dict[str, str], dict[Any, Any]]:
    """By case "ok" or what is wrong, and what count_bytes found.

    Comparisons fail after the collectives, so that ranks stay together.
    """
    group, report = TorchGroup(dist.group.WORLD), {}
    for name, case in cases.items():
        report[name] = "ok"
        for run in (run_simple, run_mlp):
            try:
                run(case, rank, group)
            except (AssertionError, AscendMoEError) as error:
                report[name] = f"{run.__name__} of {case}: {error}"
    return report, count_bytes(group, rank)
