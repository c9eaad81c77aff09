"""What each rank does with a case, with every strategy and payload. Spawned processes import this module.

Two kinds of experts. *Simple* ones, ``x * gain + shift`` in fp32, give the same bits however rows are batched, so that
in exact mode the sum over experts, in the order of ranks and slots, is known bit for bit. *MLP* ones are the reference
experts, compared within the dtype's bounds with the same experts on this rank's own tokens, without communication.

Symbols: T_r tokens of rank r; H hidden size; K top-k; E experts; C capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from exchange_cases import NAN, Case, Tokens

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched, TokenComm
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.comm.payload import QuantizedDispatch, dequantize_tokens, quantize_tokens
from vllm_ascend_moe.comm.uneven_all_gather import UnevenAllGather
from vllm_ascend_moe.errors import AscendMoEError
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.counting_group import CountingGroup

N = 8
READ_AS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


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
        "uneven_allgather": UnevenAllGather(group, packed_bytes=case.seed % 2 << 30, exact=exact),
    }


def exchange(
    comm: TokenComm, case: Case, tokens: Tokens, rank: int, work: Callable[[Dispatched, list[int]], torch.Tensor]
) -> torch.Tensor:
    """Dispatch, experts on rows with NaN wherever nothing may be read, and combine of the same.

    Raises AssertionError after the collectives only, so that ranks stay together.
    """
    local = case.placed().experts_of(rank)
    given = (tokens.hidden, tokens.weights, tokens.ids)
    kept = [x.clone() for x in given]
    sent = comm.dispatch(*given, num_experts=case.num_experts, layout=tokens.layout)
    y = work(poison(sent, local), local)
    if isinstance(getattr(comm, "inner", comm), PaddedAllGather):
        y = y.masked_fill(~tokens.layout.valid_rows()[:, None], NAN)
    out = comm.combine(y, sent.handle)
    if sent.format is ActivationFormat.BATCHED:
        capacity = max(1, max(case.sizes) + case.slack)
        assert sent.hidden.shape == (len(local), capacity * len(case.sizes), case.hidden_size)
        assert sent.expert_num_tokens.dtype == torch.int32
    else:
        assert sent.topk_ids.dtype == case.id_dtype
        assert sent.topk_weights.dtype == torch.float32
    assert sent.scales is not None or sent.hidden.dtype == case.dtype
    check_load(sent, case, local)
    for before, now in zip(kept, given, strict=True):
        assert torch.equal(before.nan_to_num(7), now.nan_to_num(7)), "an input was written to"
    return out


def check_load(sent: Dispatched, case: Case, local: list[int]) -> None:
    """Each expert here has the tokens that chose it and no other: pad rows and foreign ids cost nothing."""
    everyone = torch.cat([Tokens.of(case, rank).ids for rank in range(len(case.sizes))])
    chose = [int((everyone == expert).any(1).sum()) for expert in local]
    if sent.format is ActivationFormat.BATCHED:
        assert sent.expert_num_tokens.tolist() == chose, "rows of each expert"
    else:
        assert [int((sent.topk_ids == expert).any(1).sum()) for expert in local] == chose, "rows of each expert"


def poison(sent: Dispatched, local: list[int]) -> Dispatched:
    """NaN in every row that no expert here may read, and in its weights or scale."""
    if sent.format is ActivationFormat.BATCHED:
        unused = torch.arange(sent.hidden.shape[1]) >= sent.expert_num_tokens[:, None]
    else:
        unused = ~torch.isin(sent.topk_ids, torch.tensor(local, dtype=sent.topk_ids.dtype)).any(1)
        sent = replace(sent, topk_weights=sent.topk_weights.masked_fill(unused[:, None], NAN))
    if sent.scales is not None:
        return replace(sent, scales=sent.scales.masked_fill(unused, NAN))
    return replace(sent, hidden=sent.hidden.masked_fill(unused[..., None], NAN))


def simple_checks(case: Case, rank: int, group: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Exact mode: every strategy gives the bits of the ordered sum, with the case's payload."""
    for name, comm in strategies(case, group, exact=True).items():
        if case.payload is None:
            yield name, partial(check_simple, comm, case, rank, None)
            continue
        quantized = QuantizedDispatch(comm, case.payload)
        yield f"{name}, {case.payload}", partial(check_simple, quantized, case, rank, case.dtype)
        if comm.format is ActivationFormat.BATCHED:
            handing_on = QuantizedDispatch(comm, case.payload, dequantize=False)
            yield f"{name}, {case.payload} handed on", partial(check_simple, handing_on, case, rank, torch.float32)


def check_simple(comm: TokenComm, case: Case, rank: int, arrives_in: torch.dtype | None) -> None:
    """``arrives_in``: the type tokens are dequantised to; None: they are not quantised."""
    tokens, experts, placement = Tokens.of(case, rank), SimpleExperts(case), case.placed()

    def work(sent: Dispatched, local: list[int]) -> torch.Tensor:
        if sent.format is ActivationFormat.BATCHED:
            return experts.batched(sent.hidden, sent.expert_num_tokens, local, sent.scales)
        return experts.rows(sent.hidden, sent.topk_weights, sent.topk_ids, local)

    out = exchange(comm, case, tokens, rank, work)
    plain = experts.expected(tokens.hidden, tokens, placement)
    if arrives_in is None:
        assert_equal(out, plain)
        return
    arrived = there_and_back(tokens.hidden, case.payload, arrives_in)
    assert_equal(out, experts.expected(arrived, tokens, placement))
    check_bound(out, plain, experts, tokens, case)


def there_and_back(x: torch.Tensor, payload: str, dtype: torch.dtype) -> torch.Tensor:
    values, scales = quantize_tokens(x, payload)
    return dequantize_tokens(values.view(READ_AS[payload]), scales, dtype)


def check_bound(out: torch.Tensor, plain: torch.Tensor, experts: SimpleExperts, tokens: Tokens, case: Case) -> None:
    """The error of each element, against what rounding of its token can do to it."""
    x = tokens.hidden.double().nan_to_num(0)
    scale = x.abs().amax(1, keepdim=True) / {"int8": 127, "fp8": 448}[case.payload]
    step = scale / 2 if case.payload == "int8" else torch.maximum(x.abs() / 16, scale / 1024)
    step = step + x.abs() * torch.finfo(case.dtype).eps  # of the type it comes back in
    off = (out.double() - plain.double()).abs() - experts.reach(tokens, step) - plain.double().abs() * 1e-5 - 1e-6
    assert off.numel() == 0 or off.max() <= 0, f"{off.max():.3g} above the bound"


def mlp_checks(case: Case, rank: int, group: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """As the engine runs it: within the dtype's bound of the same experts without communication."""
    for name, comm in strategies(case, group, exact=False).items():
        yield f"{name}, MLP", partial(check_mlp, comm, case, rank)


def check_mlp(comm: TokenComm, case: Case, rank: int) -> None:
    tokens, experts = Tokens.of(case, rank), MlpExperts(case)
    expert_map = case.placed().expert_map(rank)

    def work(sent: Dispatched, local: list[int]) -> torch.Tensor:
        weights, reference = experts.local(local), ReferenceExperts()
        if sent.format is ActivationFormat.BATCHED:
            return reference.apply_batched(sent.hidden, sent.expert_num_tokens, weights)
        return reference.apply(sent.hidden, sent.topk_weights, sent.topk_ids, weights, expert_map=expert_map)

    out = exchange(comm, case, tokens, rank, work)
    dense = ReferenceExperts().apply(tokens.hidden.double(), tokens.weights.double(), tokens.ids, experts.all)
    nowhere = tokens.nowhere(case.num_experts)
    assert out.dtype == case.dtype
    assert_close(out, dense)
    assert_equal(out[nowhere], torch.zeros_like(out[nowhere]), what="tokens routed nowhere")


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
    """By case "ok" or what is wrong with which strategy; and what count_bytes found."""
    group, report = TorchGroup(dist.group.WORLD), {}
    for name, case in cases.items():
        faults = []
        for what, check in (*simple_checks(case, rank, group), *mlp_checks(case, rank, group)):
            try:
                check()
            except (AssertionError, AscendMoEError) as error:
                faults.append(f"{what}: {error}")
        report[name] = "; ".join([f"{case}", *faults]) if faults else "ok"
    return report, count_bytes(group, rank)
