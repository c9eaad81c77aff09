"""What each rank does on its NPU for test_operators_compiled.py. Spawned processes import this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compile_ranks import E, H, K, make_context
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from vllm.forward_context import override_forward_context

import vllm_ascend_moe.ops.register_custom_ops as ops
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import relative_error

# Token counts of the two ranks; compiled at the first. The first KEPT leave rank 0's count alone.
STEPS = [[3, 2], [3, 5], [3, 0], [3, 7], [6, 2], [2, 2], [3, 2]]
KEPT = 4
KINDS = ["layout", "DP metadata", "no metadata"]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32]
CASES = {
    "layout, eager": ("layout", "eager", torch.bfloat16),
    "layout, aot_eager": ("layout", "aot_eager", torch.float32),
    "DP metadata, aot_eager": ("DP metadata", "aot_eager", torch.bfloat16),
    "no metadata, aot_eager": ("no metadata", "aot_eager", torch.float32),
}
BOUND = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def moe_model(rank: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Hidden, ids and weights are gathered one by one; each rank works on its choices; reduce; + x."""
    weights = data.expert_weights(rank, [0], H, 16, dtype, gated=False)
    w13, w2 = weights.w13[0].npu(), weights.w2[0].npu()

    def model(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        gather, reduce = operators()
        hidden, chosen, scale = gather(x), gather(ids), gather(topk_weights)
        y = torch.nn.functional.silu(hidden @ w13.T) @ w2.T
        mine = torch.where(chosen % 2 == rank, scale, 0.0).masked_fill(chosen < 0, 0.0)
        return reduce(y * mine.sum(1, keepdim=True).to(y.dtype)) + x

    return model


def inputs_of(rank: int, sizes: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    tokens = data.token_ids(TokenLayout.of(sizes, rank), rank)
    made = data.hidden_states(1, tokens, H, dtype), data.topk_ids(1, tokens, K, E), data.topk_weights(1, tokens, K)
    return tuple(x.npu() for x in made)


def run_steps(rank: int, kind: str, backend: str, dtype: torch.dtype) -> dict[str, Any]:
    """All steps eager and compiled; what differs, and the number of graphs at each step."""
    model = moe_model(rank, dtype)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    wrong, graphs = [], []
    for step in STEPS:
        sizes = [max(step)] * 2 if kind == "no metadata" else step
        inputs = inputs_of(rank, sizes, dtype)
        with override_forward_context(make_context(kind, sizes, rank)):
            eager, out = model(*inputs), compiled(*inputs)
        same = (out.shape, out.dtype, out.device) == (eager.shape, eager.dtype, eager.device)
        if not same or not relative_error(out.cpu(), eager.cpu()) <= BOUND[dtype]:
            wrong.append(f"{sizes}: {out} against {eager}")
        graphs.append(counter.frame_count)
    return {"wrong": wrong, "graphs": graphs}


def operators() -> list[Any]:
    return [torch.ops.vllm.maybe_all_gather_and_maybe_unpad.default, torch.ops.vllm.maybe_pad_and_reduce.default]


def calls(rank: int) -> list[tuple[str, list[int], Any, torch.Tensor]]:
    """(kind, sizes, operator, input on the NPU)."""
    found = []
    for kind in KINDS:
        for sizes in [[2, 2], [3, 2], [0, 3]]:
            if kind == "no metadata" and sizes != [2, 2]:
                continue
            for dtype in DTYPES:
                rows = torch.ones(sizes[rank], 4, dtype=dtype).npu()
                whole = torch.ones(2 * max(sizes), 4, dtype=dtype).npu()
                found += [(kind, sizes, op, x) for op, x in zip(operators(), (rows, whole), strict=True)]
    return found


def fakes(rank: int) -> list[str]:
    """Where the fake implementation differs from the real operator: shape, strides, dtype, device."""
    wrong = []
    for kind, sizes, operator, x in calls(rank):
        with override_forward_context(make_context(kind, sizes, rank)):
            real = operator(x)
            with FakeTensorMode() as mode:
                fake = operator(mode.from_tensor(x))
        of = [(t.shape, t.stride(), t.dtype, t.device) for t in (real, fake)]
        if of[0] != of[1]:
            wrong.append(f"{operator}, {kind}, {sizes}: real {of[0]}, fake {of[1]}")
    return wrong


def symbolic(rank: int) -> list[str]:
    """Rows of the fakes while a graph is traced with counts: a symbol each, so that no count is in the graph."""
    baked = []
    for kind, sizes, operator, x in calls(rank):
        with (
            override_forward_context(make_context(kind, sizes, rank)),
            FakeTensorMode(shape_env=ShapeEnv()) as mode,
        ):
            rows = operator(mode.from_tensor(x)).shape[0]
        if kind != "no metadata" and isinstance(rows, int):
            baked.append(f"{operator}, {kind}, {sizes}: {rows}")
    return baked


def opchecks(rank: int) -> list[str]:
    """Answers of opcheck that are not SUCCESS."""
    wrong = []
    for kind, sizes, operator, x in calls(rank):
        if x.dtype in (torch.bfloat16, torch.int32) or (sizes == [2, 2] and kind != "no metadata"):
            continue  # slow, and no other way through the operators
        with override_forward_context(make_context(kind, sizes, rank)):
            answers = torch.library.opcheck(operator, (x,), raise_exception=False)
        wrong += [f"{operator}, {kind}, {sizes}, {what}: {a}" for what, a in answers.items() if a != "SUCCESS"]
    return wrong


def body(rank: int, ranks: int) -> dict[str, Any]:
    torch.npu.set_device(rank)
    ops.register_custom_ops()
    group = TorchGroup(dist.group.WORLD)
    ops.get_ep_group = ops.get_dp_group = lambda: group
    return {
        "fakes": fakes(rank),
        "symbolic": symbolic(rank),
        "opcheck": opchecks(rank),
        "steps": {name: run_steps(rank, *case) for name, case in CASES.items()},
    }
