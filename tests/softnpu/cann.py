"""CANN's C interface, called directly: for what torch_npu would not do, and for processes without torch."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

H2H, H2D, D2H, D2D = 0, 1, 2, 3
OUT_OF_MEMORY = 207001

_acl = ctypes.CDLL("libascendcl.so")
_acl.aclGetRecentErrMsg.restype = ctypes.c_char_p


class CannError(RuntimeError):
    """A call failed; ``code`` is what it returned."""

    def __init__(self, code: int) -> None:
        super().__init__((_acl.aclGetRecentErrMsg() or b"").decode())
        self.code = code


def call(name: str, *arguments, library=_acl) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise CannError(code)


def set_device(device: int) -> None:
    call("aclrtSetDevice", device)


def malloc(size: int) -> int:
    address = ctypes.c_void_p()
    call("aclrtMalloc", ctypes.byref(address), ctypes.c_size_t(size), 0)
    return address.value


def free(address: int) -> None:
    call("aclrtFree", ctypes.c_void_p(address))


def stream() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    call("aclrtCreateStream", ctypes.byref(made))
    return made


def copy(to: int, source: int, size: int, kind: int, room: int | None = None, on=None) -> None:
    sizes = (ctypes.c_void_p(to), ctypes.c_size_t(size if room is None else room), ctypes.c_void_p(source))
    if on is None:
        call("aclrtMemcpy", *sizes, ctypes.c_size_t(size), kind)
    else:
        call("aclrtMemcpyAsync", *sizes, ctypes.c_size_t(size), kind, on)


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a process of its own, without torch, with these environment variables."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
