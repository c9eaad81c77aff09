"""Which CPU cores each worker runs on, where vLLM's automatic binding cannot say.

vLLM binds one worker to one NUMA node and stops where there are more workers than nodes. Developing on one machine
means exactly that, so the cores are dealt out evenly instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ascend_moe.platform import logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

_BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
# What this module has set in this process, to tell it from what the user set.
_ours: dict[str, str] = {}


def deal_cores(cores: Sequence[int], num_workers: int) -> str:
    """Core lists in vLLM's notation, one per worker.

    >>> deal_cores([0, 1, 2, 3], 2)
    '0,1|2,3'
    >>> deal_cores([0, 1], 4)            # fewer cores than workers: they take turns
    '0|1|0|1'
    >>> deal_cores([0, 1, 2], 2)         # nobody gets a share that others lack
    '0|1'
    """
    share = max(1, len(cores) // num_workers)
    starts = [(worker * share) % len(cores) for worker in range(num_workers)]
    return "|".join(",".join(str(core) for core in cores[start : start + share]) for start in starts)


def bind_workers(parallel_config: ParallelConfig) -> None:
    """Sets vLLM's binding variable for the workers of this node, unless the user set it or vLLM can do it itself.

    A value of ours from an earlier engine of this process is not the user's: it is replaced, or taken back.
    """
    if os.environ.get(_BIND_VARIABLE) == _ours.get(_BIND_VARIABLE):
        os.environ.pop(_BIND_VARIABLE, None)
        _ours.clear()
    if os.environ.get(_BIND_VARIABLE, "auto") != "auto" or "VLLM_CPU_SIM_MULTI_NUMA" in os.environ:
        return
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_visible_memory_node

    # Started one process a DP rank, each sees one local rank, but vLLM counts the lists from local rank 0.
    engines = max(parallel_config.data_parallel_size_local, (parallel_config.data_parallel_rank_local or 0) + 1)
    num_workers = engines * parallel_config.local_world_size
    if num_workers <= 1 or num_workers <= len(get_visible_memory_node()):
        return
    cores = sorted({cpu.id for cpu in get_allowed_cpu_list()})
    binding = deal_cores(cores, num_workers)
    os.environ[_BIND_VARIABLE] = _ours[_BIND_VARIABLE] = binding
    logger.info(
        "%d workers on %d cores of one NUMA node: %s=%s. Set the variable yourself, or "
        'additional_config {"ascend_moe": {"bind_cpus": false}}, to decide otherwise.',
        num_workers,
        len(cores),
        _BIND_VARIABLE,
        binding,
    )
