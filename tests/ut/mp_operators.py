"""What each of R gloo processes does with the two operators, through the dispatcher, for test_mp_padded.py.

vLLM takes seconds to import in each process, and of it the operators use four functions, which are replaced here by
those of this process. That the names are vLLM's is proved in test_custom_ops_fake.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from marked_rows import padded, rows

from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY, ForwardLayouts
from vllm_ascend_moe.ops.native import Group, TorchGroup
from vllm_ascend_moe.testing.compare import assert_equal

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
WIDTHS = (1, 3)


def load_operators(ep_group: Group, dp_group: Group) -> Any:
    """Registers the operators in this process, over these groups; returns the object whose ``context`` they see."""
    holder = SimpleNamespace(context=None)
    functions: dict[str, dict[str, Callable[[], Any]]] = {
        "vllm": {},
        "vllm.distributed": {
            "get_ep_group": lambda: ep_group,
            "get_dp_group": lambda: dp_group,
            "get_pcp_group": lambda: SimpleNamespace(world_size=1),
        },
        "vllm.forward_context": {"get_forward_context": lambda: holder.context},
    }
    for name, members in functions.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    from vllm_ascend_moe.ops.register_custom_ops import register_custom_ops

    assert register_custom_ops()
    return holder


def round_trip(rank: int, sizes: list[int], width: int, dtype: torch.dtype) -> None:
    """Gathers marked rows, and reduces them with every other rank's contribution zero: each comes back."""
    x = rows(rank, sizes[rank], width, dtype)
    out = torch.ops.vllm.maybe_all_gather_and_maybe_unpad(x)
    assert_equal(out, padded(sizes, -1 if dtype in (torch.int32, torch.int64) else 0, width, dtype), what="gathered")
    mine = torch.zeros_like(out)
    here = slice(rank * max(sizes), (rank + 1) * max(sizes))
    mine[here] = out[here]
    assert_equal(torch.ops.vllm.maybe_pad_and_reduce(mine), x, what="reduced")


def run_operators(rank: int, ranks: int, size_vectors: dict[str, list[int]]) -> dict[str, str]:
    """By name of the size vector "ok", or what is wrong; on 4 ranks also as DP=2 x TP=2 without SP."""
    ep_group = TorchGroup(dist.group.WORLD)
    # Every process makes every group; TP rank t's DP group has the ranks t, t + TP, ...
    tp_size = 2 if ranks == 4 else 1
    dp_groups = [dist.new_group(list(range(t, ranks, tp_size))) for t in range(tp_size)]
    dp_group = TorchGroup(dp_groups[rank % tp_size])
    holder = load_operators(ep_group, dp_group)
    report = {}
    for name, sizes in size_vectors.items():
        layouts = ForwardLayouts(by_group={"ep": TokenLayout.of(sizes, rank)}, active="ep")
        holder.context = SimpleNamespace(dp_metadata=None, additional_kwargs={FORWARD_LAYOUTS_KEY: layouts})
        report[name] = _result(lambda sizes=sizes: [round_trip(rank, sizes, w, d) for w in WIDTHS for d in DTYPES])
    counts = [5, 2, 0, 3, 1, 1, 4, 2][: dp_group.world_size]
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(counts))
    holder.context = SimpleNamespace(dp_metadata=metadata)
    report["DP metadata"] = _result(lambda: round_trip(dp_group.rank_in_group, counts, 3, torch.float32))
    holder.context = SimpleNamespace(dp_metadata=None)
    report["no metadata"] = _result(lambda: round_trip(rank, [2] * ranks, 3, torch.float32))
    return report


def _result(body: Callable[[], Any]) -> str:
    try:
        body()
    except AssertionError as error:
        return str(error)
    return "ok"
