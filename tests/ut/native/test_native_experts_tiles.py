"""AMX: the tiles of a thread belong to whoever sets them next. What was set before does not matter; nothing stays."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from expert_cases import make_weights

import vllm_ascend_moe
from vllm_ascend_moe.experts.native import NativeExperts, available_isas

pytestmark = pytest.mark.skipif(
    "amx_bf16" not in available_isas(torch.bfloat16), reason="needs the native extension, and AMX for bf16"
)
CONFIG_BYTES = 64
STORE_CONFIG = bytes.fromhex("c4e2794907 c3")  # sttilecfg (%rdi); ret
LOAD_CONFIG = bytes.fromhex("c4e2784907 c3")  # ldtilecfg (%rdi); ret
# mov $64,%eax; lock xadd %rax,(%rdi); sttilecfg 64(%rdi,%rax,1); ret: each thread stores behind the count at %rdi.
STORE_OF_EACH = bytes.fromhex("b840000000 f0480fc107 c4e27949440740 c3")


class Code:
    """Machine code as a function of one pointer."""

    def __init__(self, code: bytes) -> None:
        self._room = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._room.write(code)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))

    def __call__(self, pointer: ctypes.Array[ctypes.c_char]) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)(ctypes.addressof(pointer))


def config_here() -> bytes:
    """What is set on this thread: zeros where nothing is."""
    stored = ctypes.create_string_buffer(CONFIG_BYTES)
    Code(STORE_CONFIG)(stored)
    return stored.raw


def configs_of_threads(threads: int) -> list[bytes]:
    """The same for the threads of the OpenMP pool that the extension uses."""
    code = Code(STORE_OF_EACH)
    stored = ctypes.create_string_buffer(CONFIG_BYTES * (1 + threads))
    extension = ctypes.CDLL(vllm_ascend_moe._native.__file__)
    extension.GOMP_parallel(
        ctypes.c_void_p(code.address), ctypes.c_void_p(ctypes.addressof(stored)), ctypes.c_uint(threads), 0
    )
    assert int.from_bytes(stored.raw[:8], "little") == CONFIG_BYTES * threads, "not every thread has stored"
    return [stored.raw[CONFIG_BYTES * i :][:CONFIG_BYTES] for i in range(1, threads + 1)]


def set_tiles(rows: int, row_bytes: int) -> bytes:
    """Sets all eight tiles of this thread to one size."""
    config = bytes([1, *[0] * 15, *[row_bytes, 0] * 8, *[0] * 16, *[rows] * 8, *[0] * 8])
    Code(LOAD_CONFIG)(ctypes.create_string_buffer(config, CONFIG_BYTES))
    return config


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def some_call(hidden_size=128):
    torch.manual_seed(1)
    weights = make_weights(8, hidden_size, 128, torch.bfloat16)
    hidden, topk_weights = torch.randn(90, hidden_size).bfloat16(), torch.rand(90, 2)
    ids = torch.randint(0, 8, (90, 2))
    return lambda: NativeExperts("amx_bf16").apply(hidden, topk_weights, ids, weights)


@pytest.mark.parametrize("hidden_size", [128, 32])  # 32: the second product is one thread's
@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
def test_no_thread_keeps_tiles(threads, hidden_size):
    """Other libraries may take tiles for unset, and threads with tiles are slower to switch."""
    call = some_call(hidden_size)
    for _ in range(10):
        call()
        assert configs_of_threads(threads) == [bytes(CONFIG_BYTES)] * threads
        assert config_here() == bytes(CONFIG_BYTES)


@pytest.mark.parametrize("threads", [1], indirect=True)  # with more, this one may get no product to do
@pytest.mark.parametrize(("rows", "row_bytes"), [(1, 4), (16, 64), (7, 32)])
def test_tiles_of_another_library_do_not_matter(threads, rows, row_bytes):
    """Set before a call, also after an earlier one: the same bits, and none is left."""
    call = some_call()
    want = call()
    for _ in range(2):
        config = set_tiles(rows, row_bytes)
        assert config_here() == config
        assert torch.equal(call(), want)
        assert config_here() == bytes(CONFIG_BYTES)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_between_products_of_onednn(threads):
    """PyTorch's bf16 products, on AMX too, and ours in turn."""
    call = some_call()
    a, b = torch.randn(96, 160).bfloat16(), torch.randn(160, 64).bfloat16()
    want, product = call(), a @ b
    for _ in range(5):
        assert torch.equal(a @ b, product)
        assert torch.equal(call(), want)
