"""What can go wrong before a program runs on the soft NPU."""

from __future__ import annotations


class ContractError(AssertionError):
    """An emulated operator returns other shapes or types than torch_npu's host code says."""


class SoftNPUError(RuntimeError):
    """The soft NPU cannot be built or started; the message says what to do."""
