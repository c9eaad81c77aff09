"""Host work, counted: device work that was submitted, and calls that waited for the device."""

from __future__ import annotations

import torch


def counts() -> dict[str, int]:
    """How often each kind of work was submitted in this process since :func:`reset_counts`.

    Keys: aclnn functions (``aclnnRmsNorm``), aten operators (``aten::add.Tensor``), collectives (``HcclAllGather``),
    copies (``aclrtMemcpyAsync``) and blocking calls (``aclrtSynchronizeStream``, ``aclrtMemcpy``).
    """
    lines = torch.ops.softnpu.counts().splitlines()
    return {name: int(number) for name, number in (line.rsplit(" ", 1) for line in lines)}


def reset_counts() -> None:
    """Starts counting from zero."""
    torch.ops.softnpu.reset_counts()
