"""What each of two gloo processes does for test_custom_ops_compile.py: opcheck, and compiled models at many counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context

import vllm_ascend_moe.ops.register_custom_ops as ops
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY, ForwardLayouts
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import relative_error

H, E, K = 8, 4, 2

# Token counts of the two ranks, step by step. Compiled at the first; up to KEPT rank 0 keeps its count.
STEPS = [[3, 2], [3, 5], [3, 0], [3, 7], [0, 2], [0, 5], [4, 0], [0, 0], [1, 1], [6, 7], [3, 2]]
KEPT = 4

# name: (model, how the context is made, dynamic)
CASES = {
    "experts, layout, automatic": ("experts", "layout", None),
    "residual, layout, static": ("residual", "layout", False),
    "residual, DP metadata, dynamic": ("residual", "DP metadata", True),
    "residual, no metadata, dynamic": ("residual", "no metadata", True),
}


def make_context(kind: str, sizes: list[int], rank: int) -> ForwardContext:
    context = ForwardContext({}, {}, {})
    if kind == "layout":
        layouts = ForwardLayouts(by_group={"ep": TokenLayout.of(sizes, rank)}, active="ep")
        context.additional_kwargs[FORWARD_LAYOUTS_KEY] = layouts
    elif kind == "DP metadata":
        context.dp_metadata = DPMetadata(torch.tensor(sizes, dtype=torch.int32))
    return context


def residual_model(rank: int) -> Callable[..., torch.Tensor]:
    """x -> gather -> MLP, with a factor per rank of the (R, M, H) view -> reduce -> + x."""
    weights = data.expert_weights(0, [0], H, 16, gated=False)
    factor = torch.tensor([0.5, 2.0])[:, None, None]

    def model(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        gathered = torch.ops.vllm.maybe_all_gather_and_maybe_unpad(x)
        hidden = torch.nn.functional.silu(gathered @ weights.w13[0].T) @ weights.w2[0].T
        hidden = (hidden.view(2, -1, H) * factor).flatten(0, 1)
        return torch.ops.vllm.maybe_pad_and_reduce(hidden) + x

    return model


def experts_model(rank: int) -> Callable[..., torch.Tensor]:
    """Hidden, ids and weights are gathered one by one (a symbol each); this rank's experts work; reduce; + x."""
    local = data.local_experts(E, rank, 2)
    weights = data.expert_weights(0, local, H, 16, gated=False)

    def model(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.ops.vllm.maybe_all_gather_and_maybe_unpad(x)
        chosen = torch.ops.vllm.maybe_all_gather_and_maybe_unpad(ids)
        scale = torch.ops.vllm.maybe_all_gather_and_maybe_unpad(topk_weights)
        total = torch.zeros_like(hidden)
        for slot, expert in enumerate(local):
            y = torch.nn.functional.silu(hidden @ weights.w13[slot].T) @ weights.w2[slot].T
            total = total + y * torch.where(chosen == expert, scale, 0.0).sum(1, keepdim=True)
        return torch.ops.vllm.maybe_pad_and_reduce(total) + x

    return model


def run_case(rank: int, case: str) -> dict[str, Any]:
    """Runs all steps eager and compiled; what differs, and the number of graphs compiled so far at each step."""
    name, kind, dynamic = CASES[case]
    model = {"residual": residual_model, "experts": experts_model}[name](rank)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
    wrong, graphs = [], []
    for step in STEPS:
        sizes = [max(step)] * 2 if kind == "no metadata" else step
        tokens = data.token_ids(TokenLayout.of(sizes, rank), rank)
        x = data.hidden_states(1, tokens, H, torch.float32)
        inputs = (x, data.topk_ids(1, tokens, K, E, dtype=torch.int64), data.topk_weights(1, tokens, K))
        with override_forward_context(make_context(kind, sizes, rank)):
            eager, out = model(*inputs), compiled(*inputs)
        if out.shape != eager.shape or not relative_error(out, eager) <= 1e-5:
            wrong.append(f"{sizes}: {tuple(out.shape)} against {tuple(eager.shape)}, {out} against {eager}")
        graphs.append(counter.frame_count)
    return {"wrong": wrong, "graphs": graphs}


OPCHECK_SIZES = [[3, 2], [0, 3]]


def run_opcheck(rank: int) -> int:
    """opcheck of both operators for each layout, dimension and dtype; raises at the first fault. Returns how many."""
    checked = 0
    for sizes in OPCHECK_SIZES:
        for kind in ("layout", "DP metadata"):
            with override_forward_context(make_context(kind, sizes, rank)):
                for x in (torch.rand(sizes[rank], 4), torch.ones(sizes[rank], dtype=torch.int64)):
                    torch.library.opcheck(torch.ops.vllm.maybe_all_gather_and_maybe_unpad.default, (x,))
                    whole = x.new_ones(2 * max(sizes), *x.shape[1:])
                    torch.library.opcheck(torch.ops.vllm.maybe_pad_and_reduce.default, (whole,))
                    checked += 2
    return checked


def body(rank: int, world_size: int) -> dict[str, Any]:
    """Registers the operators in this fresh process and runs everything."""
    registered = ops.register_custom_ops(), ops.register_custom_ops()
    group = TorchGroup(dist.group.WORLD)
    ops.get_ep_group = ops.get_dp_group = lambda: group
    return {
        "registered": registered,
        "opcheck": run_opcheck(rank),
        "cases": {case: run_case(rank, case) for case in CASES},
    }
