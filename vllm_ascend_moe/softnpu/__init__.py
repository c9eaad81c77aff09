"""Real, unmodified torch_npu on a CPU: CANN's C interface implemented on host memory (see docs/softnpu.md).

Stands alone: imports nothing else of this package. The libraries are in ``csrc/softnpu``; this package builds them
(``build``), starts programs on them (``run``), and loads them in every process of such a program (``autoload``).
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Entry point ``torch.backends``: torch calls it at the end of ``import torch``, in every process.

    Does nothing unless ``ASCEND_MOE_SOFTNPU=1``, which ``python -m vllm_ascend_moe.softnpu run`` sets.
    """
    if os.environ.get("ASCEND_MOE_SOFTNPU") == "1":
        from vllm_ascend_moe.softnpu.activate import activate

        activate()
