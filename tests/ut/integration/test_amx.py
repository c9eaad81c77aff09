"""A process of vLLM has asked Linux for AMX tiles before anything may use them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

_GRANTED = """
import ctypes
from vllm_ascend_moe.integration import ask_for_amx
def granted():
    bits = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(bits)) == 0  # arch_prctl, ARCH_GET_XCOMP_PERM
    return bits.value >> 18 & 1
before = granted()
ask_for_amx()
print(before, granted())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX; on such a processor: make test-ut")
def test_tiles_are_granted() -> None:
    run = subprocess.run([sys.executable, "-c", _GRANTED], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split()[-2:] == ["0", "1"]
