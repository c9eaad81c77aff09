"""Counts what one MoE layer of vllm-ascend submits to the soft NPU, step by step: a JSON line a layer and rank.

Steps are vllm-ascend's own: prepare (gather), experts (routing operator, matrix products, un-permutation), finalize.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

# Not launches: what the host waits for, and collectives, have columns of their own.
BLOCKING = ("aclrtSynchronizeStream", "aclrtSynchronizeDevice", "aclrtSynchronizeEvent", "aclrtMemcpy")


def step(before: tuple[dict[str, int], int], after: tuple[dict[str, int], int]) -> dict[str, Any]:
    """Launches, collectives, blocking calls and allocations between two readings, and launches by name."""
    work = {name: n - before[0].get(name, 0) for name, n in after[0].items() if n != before[0].get(name, 0)}
    launches = {name: n for name, n in work.items() if not name.startswith("Hccl") and name not in BLOCKING}
    return {
        "launches": sum(launches.values()),
        "collectives": sum(n for name, n in work.items() if name.startswith("Hccl")),
        "blocking": sum(n for name, n in work.items() if name in BLOCKING),
        "allocations": after[1] - before[1],
        "by_name": launches,
    }


def _read() -> tuple[dict[str, int], int]:
    from vllm_ascend_moe.softnpu.counts import counts

    return counts(), torch.npu.memory_stats()["allocation.all.allocated"]


def install(folder: Path) -> None:
    """Wraps the three steps of vllm-ascend's MoE communication methods."""
    from vllm.distributed import get_ep_group
    from vllm.forward_context import get_forward_context
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX
    from vllm_ascend.ops.fused_moe.moe_comm_method import MoECommMethod

    row: dict[str, Any] = {}

    def wrap(name: str, key: str) -> None:
        real = getattr(MoECommMethod, name)

        @wraps(real)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = _read()
            result = real(self, *args, **kwargs)
            row[key] = step(before, _read())
            if key == "finalize":
                write()
            return result

        setattr(MoECommMethod, name, counted)

    def write() -> None:
        metadata = get_forward_context().dp_metadata
        row["counts"] = None if metadata is None else metadata.num_tokens_across_dp_cpu.tolist()
        # The tokens of each EP rank, as our functions see them; vllm-ascend's own have no such thing.
        made = get_forward_context().additional_kwargs.get("ascend_moe_padded_forward")
        row["tokens"] = None if made is None else made.layout.local_sizes
        row["comm"] = _EXTRA_CTX.moe_comm_type.name
        row["sequence_parallel"] = bool(_EXTRA_CTX.flash_comm_v1_enabled)
        row["profile"] = bool(_EXTRA_CTX.in_profile_run)
        row["rank"] = get_ep_group().rank_in_group
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        row.clear()

    for name, key in (("prepare", "prepare"), ("fused_experts", "experts"), ("finalize", "finalize")):
        wrap(name, key)


def when_imported(callback: Callable[[], None]) -> None:
    """Calls back once vllm-ascend's operators are imported."""
    import sys

    from vllm_ascend_moe.integration.vllm_ascend import _AfterImport

    if "vllm_ascend.ops" in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport("vllm_ascend.ops", callback))
