"""Whether all ranks of a group were configured alike, asked once at start: ranks that choose different collectives
hang, and which collectives a rank enters follows from these values."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakSet

import torch.distributed as dist

from vllm_ascend_moe.errors import ConfigError

# Groups that have been asked. Weak: a destroyed group must not be kept alive here.
_asked: WeakSet[dist.ProcessGroup] = WeakSet()


def check_agreement(cpu_group: dist.ProcessGroup, values: Mapping[str, object]) -> bool:
    """One small collective at the first call for a group, nothing at later ones. Call it on every rank.

    Args:
        cpu_group: gloo group.
        values: by name, what must be equal; picklable.

    Returns:
        Whether this was the first call.

    Raises:
        ConfigError: they differ; on every rank of the group.
    """
    if cpu_group in _asked:
        return False
    everyone: list[Mapping[str, object]] = [{} for _ in range(dist.get_world_size(cpu_group))]
    dist.all_gather_object(everyone, dict(values), group=cpu_group)
    for key in values:
        given = [theirs.get(key) for theirs in everyone]
        if any(value != given[0] for value in given):
            raise ConfigError(
                f"{key} by rank",
                given,
                "equal on all ranks",
                "Start every data-parallel rank with the same model, --additional-config and scheduler limits.",
            )
    _asked.add(cpu_group)
    return True
