"""Whether all ranks of a group were configured alike, asked once at start: ranks that choose different collectives
hang, and which collectives a rank enters follows from these values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

import torch.distributed as dist

from vllm_ascend_moe.errors import AscendMoEError, ConfigError

logger = logging.getLogger(__name__)

# Groups that have been asked. Weak: a destroyed group must not be kept alive here.
_asked: WeakSet[dist.ProcessGroup] = WeakSet()

_ERROR = "error"


def check_agreement(cpu_group: dist.ProcessGroup, values: Mapping[str, object]) -> bool:
    """One small collective at the first call for a group, nothing at later ones. Call it on every rank.

    Args:
        cpu_group: gloo group.
        values: by name, what must be equal; picklable.

    Returns:
        Whether this was the first call.

    Raises:
        ConfigError: they differ, or a rank has an error before it comes here (:func:`told_to_others`); on every rank of
        the group.
    """
    if cpu_group in _asked:
        return False
    everyone = _exchange(cpu_group, values)
    errors = {rank: theirs[_ERROR] for rank, theirs in enumerate(everyone) if _ERROR in theirs}
    if errors:
        raise ConfigError("errors by rank", errors, "none", "Correct what they name on these ranks.")
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


@contextmanager
def told_to_others(cpu_group: dist.ProcessGroup) -> Iterator[None]:
    """Around what may raise before :func:`check_agreement`, in which the other ranks would wait for this one."""
    try:
        yield
    except AscendMoEError as error:
        if cpu_group not in _asked:
            try:
                _exchange(cpu_group, {_ERROR: str(error)})
            except RuntimeError as lost:  # others have ended; this rank's own error is the one to show
                logger.warning("Other ranks could not be told of an error: %s", lost)
        raise


def _exchange(cpu_group: dist.ProcessGroup, values: Mapping[str, object]) -> list[Mapping[str, object]]:
    everyone: list[Mapping[str, object]] = [{} for _ in range(dist.get_world_size(cpu_group))]
    dist.all_gather_object(everyone, dict(values), group=cpu_group)
    return everyone
