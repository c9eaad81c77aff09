"""These tests run in Triton's interpreter, in a process of their own: ``make test-kernels`` (part of ``make test``).

Whether kernels are compiled or interpreted is decided when triton is imported, and vLLM behaves differently where it
finds triton: a plain ``pytest tests`` therefore leaves this folder out and says so.
"""

from __future__ import annotations

import os
import warnings

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
    warnings.warn("tests/ut/kernels is left out: it needs TRITON_INTERPRET=1 (make test-kernels)", stacklevel=1)
