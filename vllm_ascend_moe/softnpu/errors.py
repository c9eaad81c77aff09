"""What can go wrong before a program runs on the soft NPU."""

from __future__ import annotations


class SoftNPUError(RuntimeError):
    """The soft NPU cannot be built or started; the message says what to do."""
