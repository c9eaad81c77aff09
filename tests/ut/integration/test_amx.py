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
_REFUSED = """
import ctypes
from vllm_ascend_moe.integration import ask_for_amx
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 4096)), None) == 0
ask_for_amx()
"""
pytestmark = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="needs AMX; on such a processor: make test-ut"
)


def test_tiles_are_granted() -> None:
    run = subprocess.run([sys.executable, "-c", _GRANTED], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split()[-2:] == ["0", "1"]
    assert "refuses" not in run.stderr


def test_a_refusal_is_logged() -> None:
    """Linux refuses to a process that has a signal stack too small for tiles."""
    run = subprocess.run([sys.executable, "-c", _REFUSED], capture_output=True, text=True, check=True, timeout=120)
    assert "Linux refuses its tiles to this process" in run.stderr
