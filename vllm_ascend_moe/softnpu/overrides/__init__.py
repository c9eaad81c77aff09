"""Operators emulated where the dispatcher calls them: those with no aclnn function (``atb::``, ``_C_ascend::``).

One module per family; each has a function ``install()``, listed in ``INSTALLERS`` below. An operator is a plain CPU
implementation with the operator's own schema, given to :func:`emulate`.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_ascend_moe.softnpu.overrides import attention, cache, custom, moe, norm, quant, rotary

INSTALLERS: list[Callable[[], None]] = [
    attention.install,
    cache.install,
    custom.install,
    moe.install,
    norm.install,
    quant.install,
    rotary.install,
]


def install() -> None:
    """Installs every family; called once per process, when torch_npu is loaded."""
    for installer in INSTALLERS:
        installer()
