"""What each process does for test_mc2_made.py and test_compile.py. Spawned processes import this module."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from itertools import product
from typing import Any

import exchange_checks
import torch
import torch.distributed as dist
from exchange_cases import Case, Tokens

from vllm_ascend_moe.comm.base import TokenComm
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.comm.cost_model import MoEShape
from vllm_ascend_moe.comm.links import link_of
from vllm_ascend_moe.comm.mc2 import MC2, own_group
from vllm_ascend_moe.comm.situation import Situation
from vllm_ascend_moe.config import AscendMoEConfig
from vllm_ascend_moe.errors import AscendMoEError
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.npu import NpuExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.integration.strategies import make_comm, possible_strategies
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing.compare import assert_close

INT8_BOUND = 0.02  # one rounding of rows to 8 bits, in norm


def situation_of(case: Case, payload: str) -> Situation:
    shape = MoEShape(
        hidden_size=case.hidden_size, num_experts=case.num_experts, top_k=case.top_k, payload=payload, element_bytes=2
    )
    return Situation(
        shape=shape, link=link_of("npu", torch.npu.get_device_name()), comm="mc2", capacity=max(case.sizes)
    )


def local_weights(case: Case, experts: list[int]) -> ExpertWeights:
    everyone = exchange_checks.MlpExperts(case).all
    given = {f.name: getattr(everyone, f.name) for f in fields(everyone)}
    return ExpertWeights(**{name: x if x is None else x[experts].npu() for name, x in given.items()})


def layer(comm: TokenComm, case: Case, tokens: Tokens, placement: ExpertPlacement, weights: ExpertWeights) -> Any:
    """As a function of tokens on the NPU, so that it can be compiled."""
    experts, expert_map = NpuExperts(), placement.expert_map(tokens.layout.rank).npu()

    def run(hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        sent = comm.dispatch(hidden, topk_weights, topk_ids, num_experts=case.num_experts, layout=tokens.layout)
        given = sent.hidden, sent.topk_weights, sent.topk_ids
        y = experts.apply(*given, weights, expert_map=expert_map, scales=sent.scales)
        return comm.combine(y, sent.handle)

    return run


def made(rank: int, ranks: int, case: Case, payload: str) -> tuple[bool, bool]:
    """make_comm's mc2 against dense experts: whether it has a group of its own, and whether layers share it."""
    torch.npu.set_device(rank)
    group, placement, config = TorchGroup(dist.group.WORLD), case.placed(), AscendMoEConfig(quantize_dispatch=payload)
    situation = situation_of(case, payload)
    assert possible_strategies(situation, ranks) == ("mc2",)
    comms = [make_comm("mc2", group, placement, situation, config, BufferCache()) for _ in range(2)]
    tokens = Tokens.of(case, rank)
    run = layer(comms[0], case, tokens, placement, local_weights(case, placement.experts_of(rank)))
    out = run(tokens.hidden.npu(), tokens.weights.npu(), tokens.ids.npu()).cpu()
    everyone = exchange_checks.MlpExperts(case).all
    dense = ReferenceExperts().apply(tokens.hidden.double(), tokens.weights.double(), tokens.ids, everyone)
    assert out.dtype == case.dtype
    assert_close(out, dense, bound=None if payload == "none" else INT8_BOUND)
    used = [comm.group.device_group for comm in comms]
    return used[0] is not group.device_group, used[0] is used[1]


def refusals(rank: int, ranks: int, case: Case) -> list[str]:
    """Errors where the last rank's inputs are wrong: of the first dispatch, of a later one, of combine. A rank goes on
    when all have theirs."""
    torch.npu.set_device(rank)
    sizes = {"max_tokens": max(case.sizes), "hidden_size": case.hidden_size, "top_k": case.top_k}
    tokens, store, wrong = Tokens.of(case, rank), dist.distributed_c10d._get_default_store(), rank == ranks - 1
    right = tokens.hidden.npu(), tokens.weights.npu(), tokens.ids.npu()
    found = []
    for step in ("first", "later", "combine"):
        comm = MC2(own_group(TorchGroup(dist.new_group(backend="hccl"))), case.placed(), **sizes)
        if step != "first":
            sent = comm.dispatch(*right, num_experts=case.num_experts, layout=tokens.layout)
        try:
            if step == "combine":
                comm.combine(sent.hidden[1:] if wrong else sent.hidden, sent.handle)
            else:
                hidden = right[0].float() if wrong else right[0]
                comm.dispatch(hidden, *right[1:], num_experts=case.num_experts, layout=tokens.layout)
            found.append("no error")
        except AscendMoEError as error:
            found.append(f"{type(error).__name__}: {error}")
        store.add(step, 1)
        while store.add(step, 0) < ranks:
            time.sleep(0.1)
    return found


def part_of_the_experts(rank: int, ranks: int, case: Case) -> None:
    """A group of two of four ranks: choices of the other two's experts add nothing here."""
    torch.npu.set_device(rank)
    placement = ExpertPlacement.linear(case.num_experts, 4).restrict([0, 2])
    sizes = {"max_tokens": max(case.sizes), "hidden_size": case.hidden_size, "top_k": case.top_k}
    comm = MC2(own_group(TorchGroup(dist.group.WORLD)), placement, **sizes)
    tokens, mine = Tokens.of(case, rank), placement.experts_of(rank)
    run = layer(comm, case, tokens, placement, local_weights(case, mine))
    out = run(tokens.hidden.npu(), tokens.weights.npu(), tokens.ids.npu()).cpu()
    held = torch.tensor([*placement.experts_of(0), *placement.experts_of(1)], dtype=tokens.ids.dtype)
    ids = tokens.ids.masked_fill(~torch.isin(tokens.ids, held), -1)
    dense = ReferenceExperts().apply(
        tokens.hidden.double(), tokens.weights.double(), ids, exchange_checks.MlpExperts(case).all
    )
    assert (ids < 0).any()
    assert_close(out, dense)


def compiled(rank: int, ranks: int, case: Case, sizes: tuple[tuple[int, ...], ...]) -> list[bool]:
    """Dispatch, experts and combine as one graph, against the same in eager: by payload and size vector."""
    torch.npu.set_device(rank)
    placement, group = case.placed(), own_group(TorchGroup(dist.group.WORLD))
    limits = {"max_tokens": max(map(max, sizes)), "hidden_size": case.hidden_size, "top_k": case.top_k}
    weights, equal = local_weights(case, placement.experts_of(rank)), []
    for quantize, each in product((False, True), sizes):
        comm = MC2(group, placement, quantize=quantize, dequantize=True, **limits)
        comm.prepare(torch.device("npu", rank))
        tokens = Tokens.of(replace(case, sizes=each), rank)
        run = layer(comm, case, tokens, placement, weights)
        given = tokens.hidden.npu(), tokens.weights.npu(), tokens.ids.npu()
        out = torch.compile(run, backend="aot_eager", fullgraph=True)(*given)
        equal.append(torch.equal(out, run(*given)))
    return equal
