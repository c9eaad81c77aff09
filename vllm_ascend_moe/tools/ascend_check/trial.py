"""A call of a lowered kernel and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_PROGRAMS = 3
Arguments = list["torch.Tensor | int | float"]


@dataclass(frozen=True)
class Trial:
    """One call: the kernel's arguments, and after it pairs of (result, wanted, tolerance); programs: of the grid."""

    arguments: Arguments
    results: Callable[[], list[tuple[torch.Tensor, torch.Tensor, float]]]
    programs: int = _PROGRAMS
