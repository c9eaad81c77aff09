"""One JSON line per MoE layer and step: the layout, the strategy of each pass, and every collective with its bytes. Off
unless asked for.

Collectives are counted where PyTorch dispatches them: ``c10d`` operators, and our native ones, which call the process
group without another dispatch. So what is written is what ran, whoever called it. Meant for debugging and teaching:
tracing slows a layer down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.platforms import current_platform

from vllm_ascend_moe import envs
from vllm_ascend_moe.ops.forward_layouts import ForwardLayouts


class CollectiveCounter(TorchDispatchMode):
    """Records the kind and the bytes of each collective inside.

    Kinds are "gather", "reduce_scatter", "all_to_all", or else the operator's name. Bytes are those of the larger side:
    what a gather delivers, what a reduce-scatter takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "vllm":
            # Its collectives are inside: run its kernel without coming back here, but see what the kernel calls.
            key = getattr(torch._C.DispatchKey, current_platform.dispatch_key)
            with self:
                return func._op_dk(key, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        kind = _collective_kind(func)
        if kind:
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            self.collectives.append((kind, max((x.numel() * x.element_size() for x in tensors), default=0)))
        return result


def _collective_kind(func: Any) -> str:
    name = func._opname.strip("_").replace("_base", "")
    if func.namespace not in ("c10d", "ascend_moe"):
        return ""
    if "gather" in name:
        return "gather"
    if "reduce_scatter" in name:
        return "reduce_scatter"
    if "alltoall" in name or "all_to_all" in name:
        return "all_to_all"
    return name if func.namespace == "c10d" else ""


@lru_cache(maxsize=8)
def _trace_file(folder: str, pid: int) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path / f"moe-{pid}.jsonl"


def trace_folder() -> str:
    """The folder of ASCEND_MOE_TRACE, or an empty string where tracing is off."""
    return envs.get("ASCEND_MOE_TRACE")


@contextmanager
def traced_layer(layer_name: str, layouts: ForwardLayouts | None) -> Iterator[None]:
    """Writes one line for the layer that runs inside the ``with`` block, where tracing is on."""
    folder = trace_folder()
    if not folder:
        yield
        return
    before = 0 if layouts is None else len(layouts.passes)
    with CollectiveCounter() as counter:
        yield
    group = None if layouts is None else layouts.active
    layout = None if layouts is None or group is None else layouts.by_group.get(group)
    line = {
        "layer": layer_name,
        "group": group,
        "rank": None if layout is None else layout.rank,
        "local_sizes": None if layout is None else layout.local_sizes,
        "strategies": [] if layouts is None else layouts.passes[before:],
        "collectives": counter.collectives,
    }
    with _trace_file(folder, os.getpid()).open("a") as file:
        file.write(json.dumps(line) + "\n")
