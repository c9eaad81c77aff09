"""What each process does with its NPU, for test_strategies.py. Spawned processes import this module.

Cases, and what is expected of them, are those of tests/ut; tokens are made and answers checked on the CPU, everything
in between is on the NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import exchange_checks
import mp_operators
import torch
import torch.distributed as dist
from exchange_cases import Case, Tokens
from marked_rows import padded, rows

from vllm_ascend_moe.comm.base import ActivationFormat, Dispatched, TokenComm
from vllm_ascend_moe.comm.mc2 import MC2
from vllm_ascend_moe.comm.payload import quantize_tokens
from vllm_ascend_moe.errors import AscendMoEError
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.npu import NpuExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.ops.native import TorchGroup, native_group_name, padded_all_gather
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.counting_group import CountingGroup

# What HCCL adds up. It gathers others too.
REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64)
# Of W8A8 against fp64 with the same rounded weights: two roundings of rows to 8 bits.
W8A8_BOUND = 0.03


def on(device: str, record: Any) -> Any:
    """A dataclass with its tensors on a device."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{k: x.to(device) for k, x in tensors.items() if isinstance(x, torch.Tensor)})


class OnNpu:
    """A strategy that works on the NPU, for a caller on the CPU.

    Args:
        payload: "int8": tokens are quantised there, and handed on with their scales.
    """

    def __init__(self, inner: TokenComm, payload: str | None = None) -> None:
        self.inner, self.format, self.payload = inner, inner.format, payload

    def dispatch(self, *tensors: torch.Tensor, scales: torch.Tensor | None = None, **options: Any) -> Dispatched:
        hidden, weights, ids = (x.npu() for x in tensors)
        scales = None if scales is None else scales.npu()
        if self.payload is not None:
            hidden, scales = quantize_tokens(hidden, self.payload)
        sent = self.inner.dispatch(hidden, weights, ids, scales=scales, **options)
        assert sent.hidden.device.type == "npu"
        return on("cpu", sent)

    def combine(self, expert_output: torch.Tensor, handle: object) -> torch.Tensor:
        out = self.inner.combine(expert_output.npu(), handle)
        assert out.device.type == "npu"
        return out.cpu()


def strategies_on_npu(make: Callable[..., dict[str, TokenComm]], *arguments: Any, **options: Any) -> dict[str, OnNpu]:
    return {name: OnNpu(comm) for name, comm in make(*arguments, **options).items()}


# -- experts on the NPU ----------------------------------------------------------------------------------------


def experts_checks(case: Case, rank: int, group: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, comm in exchange_checks.strategies(case, group, exact=False).items():
        yield f"{name}, NPU experts", partial(check_layer, comm, case, rank)
    if case.dtype != torch.float32:
        for name, comm in exchange_checks.strategies(case, group, exact=False).items():
            yield f"{name}, W8A8", partial(check_layer, comm, case, rank, quantized=True)
            handing_on = OnNpu(comm.inner, "int8")
            yield f"{name}, W8A8 and int8 tokens", partial(check_layer, handing_on, case, rank, quantized=True)


def check_layer(comm: OnNpu, case: Case, rank: int, *, quantized: bool = False) -> None:
    """Dispatch, experts and combine on the NPU against dense experts in fp64 without communication."""
    tokens, everyone = Tokens.of(case, rank), exchange_checks.MlpExperts(case).all
    if quantized:
        scaled = ScaledExpertWeights.quantize(everyone)
        everyone = scaled.dequantize()
    expert_map = case.placed().expert_map(rank).npu()

    def work(sent: Dispatched, local: list[int]) -> torch.Tensor:
        weights = scaled if quantized else everyone
        kept = {f.name: getattr(weights, f.name) for f in fields(weights)}
        mine: ExpertWeights = on("npu", type(weights)(**{k: x if x is None else x[local] for k, x in kept.items()}))
        there, out = on("npu", sent), torch.full(sent.hidden.shape, float("nan"), dtype=case.dtype, device="npu")
        if sent.format is ActivationFormat.BATCHED:
            y = NpuExperts().apply_batched(there.hidden, there.expert_num_tokens, mine, scales=there.scales, out=out)
        else:
            y = NpuExperts().apply(
                there.hidden,
                there.topk_weights,
                there.topk_ids,
                mine,
                expert_map=expert_map,
                scales=there.scales,
                out=out,
            )
        assert y is out
        return y.cpu()

    out = exchange_checks.exchange(comm, case, tokens, rank, work)
    dense = ReferenceExperts().apply(tokens.hidden.double(), tokens.weights.double(), tokens.ids, everyone)
    nowhere = tokens.nowhere(case.num_experts)
    assert out.dtype == case.dtype
    assert_close(out, dense, bound=W8A8_BOUND if quantized else None)
    assert_equal(out[nowhere], torch.zeros_like(out[nowhere]), what="tokens routed nowhere")


# -- fused dispatch and combine ------------------------------------------------------------------------------------


def mc2_layer(case: Case, rank: int, group: TorchGroup, *, quantize: bool) -> str:
    """As check_layer, with the strategy that only NPUs have; W8A8 where tokens are quantised."""
    tokens, everyone = Tokens.of(case, rank), exchange_checks.MlpExperts(case).all
    weights: ExpertWeights = ScaledExpertWeights.quantize(everyone) if quantize else everyone
    dense = weights.dequantize() if isinstance(weights, ScaledExpertWeights) else weights
    placement = case.placed()
    sizes = {"hidden_size": case.hidden_size, "top_k": case.top_k, "max_tokens": max(1, *case.sizes)}
    comm = MC2(group, placement, quantize=quantize, **sizes)
    given = tokens.hidden.npu(), tokens.weights.npu(), tokens.ids.npu()
    sent = comm.dispatch(*given, num_experts=case.num_experts, layout=tokens.layout)
    here = placement.experts_of(rank)
    kept = {f.name: getattr(weights, f.name) for f in fields(weights)}
    mine: ExpertWeights = on("npu", type(weights)(**{k: x if x is None else x[here] for k, x in kept.items()}))
    out = torch.empty(sent.hidden.shape, dtype=case.dtype, device="npu")
    routing = sent.topk_weights, sent.topk_ids
    expert_map = placement.expert_map(rank).npu()
    y = NpuExperts().apply(sent.hidden, *routing, mine, expert_map=expert_map, scales=sent.scales, out=out)
    back = comm.combine(y, sent.handle).cpu()
    assert back.dtype == case.dtype
    wanted = ReferenceExperts().apply(tokens.hidden.double(), tokens.weights.double(), tokens.ids, dense)
    assert_close(back, wanted, bound=W8A8_BOUND if quantize else None)
    nowhere = tokens.nowhere(case.num_experts)
    assert_equal(back[nowhere], torch.zeros_like(back[nowhere]), what="tokens routed nowhere")
    return "ok"


def run_mc2(rank: int, ranks: int, cases: dict[str, Case]) -> dict[str, str]:
    """By case "ok", or what is wrong."""
    torch.npu.set_device(rank)
    group, report = TorchGroup(dist.new_group(list(range(ranks)))), {}  # of its own, as the operators want
    for name, case in cases.items():
        for quantize in (False, True):
            try:
                report[f"{name}, {'int8' if quantize else '16 bits'}"] = mc2_layer(case, rank, group, quantize=quantize)
            except (AssertionError, AscendMoEError) as error:
                report[f"{name}, {'int8' if quantize else '16 bits'}"] = f"{case}: {error}"
    return report


# -- a process -------------------------------------------------------------------------------------------------


def operators(rank: int, ranks: int, size_vectors: dict[str, list[int]]) -> dict[str, str]:
    """The two operators on marked rows: "ok" by name of the size vector, or what is wrong."""
    mp_operators.DTYPES = REDUCED
    torch.set_default_device("npu")
    try:
        return mp_operators.run_operators(rank, ranks, size_vectors)
    finally:
        torch.set_default_device(None)


def gathers(rank: int, ranks: int, group: Any) -> str:
    """Dtypes that HCCL gathers, some of them as another type of the same size, but does not add up."""
    sizes = [(2 * r + 1) % 4 for r in range(ranks)]
    for dtype in (torch.uint8, torch.bool, torch.int16):
        out = padded_all_gather(rows(rank, sizes[rank], dtype=dtype).npu(), max(sizes), group)
        assert_equal(out.cpu(), padded(sizes, dtype=dtype), what=f"{dtype}")
    return "ok"


def run(rank: int, ranks: int, cases: dict[str, Case], size_vectors: dict[str, list[int]]) -> dict[str, dict[str, str]]:
    """By form and case "ok", or what is wrong."""
    torch.npu.set_device(rank)
    group = TorchGroup(dist.group.WORLD)
    assert (native_group_name(group) is not None) == native_available()
    exchange_checks.strategies = partial(strategies_on_npu, exchange_checks.strategies)
    reports = {"operators": operators(rank, ranks, size_vectors)}
    for form, used in (("native", group), ("plain torch", CountingGroup(group))):
        reports[form] = {name: run_case(case, rank, used) for name, case in cases.items()}
        reports[form]["gathers"] = gathers(rank, ranks, used)
    return reports


def run_case(case: Case, rank: int, group: Any) -> str:
    faults = []
    checks = (
        *exchange_checks.simple_checks(case, rank, group),
        *exchange_checks.mlp_checks(case, rank, group),
        *experts_checks(case, rank, group),
    )
    for what, check in checks:
        try:
            check()
        except (AssertionError, AscendMoEError) as error:
            faults.append(f"{what}: {error}")
    return "; ".join([f"{case}", *faults]) if faults else "ok"
