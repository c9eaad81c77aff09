"""A vLLM plugin for engine tests on the soft NPU: the one Triton kernel that an engine needs, which triton-ascend would
compile on an NPU host, as torch code; and counting, where it is asked for.

vLLM loads it in every process where this folder is on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from softnpu_engines_counts import install, when_imported

# A folder: what each MoE layer submits is counted into it.
COUNTS_VARIABLE = "SOFTNPU_ENGINES_COUNTS"
_counting: list[str] = []
_MODULES = ("vllm.v1.worker.block_table", "vllm_ascend.worker.block_table")
_NAME = "_compute_slot_mapping_kernel"


class SlotMappingKernel:
    """Stands for vLLM's ``_compute_slot_mapping_kernel``: ``kernel[(num_reqs + 1,)](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            num_tokens: int,
            max_num_tokens: int,
            query_start_loc: torch.Tensor,
            positions: torch.Tensor,
            block_table: torch.Tensor,
            block_table_stride: int,
            block_size: int,
            slot_mapping: torch.Tensor,
            *,
            TOTAL_CP_WORLD_SIZE: int,
            TOTAL_CP_RANK: int,
            CP_KV_CACHE_INTERLEAVE_SIZE: int,
            PAD_ID: int,
            BLOCK_SIZE: int,
        ) -> None:
            if TOTAL_CP_WORLD_SIZE != 1:
                raise NotImplementedError("slot mapping with context parallelism")
            slot_mapping[num_tokens:max_num_tokens] = PAD_ID
            for request in range(grid[0] - 1):
                start, end = query_start_loc[request : request + 2].tolist()
                place = positions[start:end]
                blocks = block_table[request][place // block_size].to(torch.int64)
                slot_mapping[start:end] = blocks * block_size + place % block_size

        return launch


def register() -> None:
    """Replaces the kernel where it is looked up; vllm-ascend imports it from vLLM."""
    import vllm.v1.worker.block_table  # noqa: F401

    for name in _MODULES:
        if name in sys.modules:
            setattr(sys.modules[name], _NAME, SlotMappingKernel())
    folder = os.environ.get(COUNTS_VARIABLE)
    if folder and not _counting:
        _counting.append(folder)
        when_imported(lambda: install(Path(folder)))
