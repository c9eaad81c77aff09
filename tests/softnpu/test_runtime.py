"""Wrong use of the runtime is found and named; faults come on demand."""

import ctypes

import cann
import pytest
import torch

HOST = ctypes.create_string_buffer(4096)
HOST_ADDRESS = ctypes.addressof(HOST)


@pytest.fixture(autouse=True)
def device():
    cann.set_device(0)


@pytest.fixture
def block():
    address = cann.malloc(1024)
    yield address
    cann.free(address)


def refused(match):
    return pytest.raises(cann.CannError, match=match)


def test_memory_is_aligned_and_copies_work(block):
    assert block % 512 == 0
    HOST[:4] = b"abcd"
    cann.copy(block, HOST_ADDRESS, 4, cann.H2D)
    cann.copy(block + 512, block, 4, cann.D2D)
    cann.copy(HOST_ADDRESS + 8, block + 512, 4, cann.D2H)
    assert HOST[8:12] == b"abcd"


def test_copies_out_of_bounds(block):
    with refused(r"destination: out of bounds: 8 bytes at offset 1020 of allocation \d+ of device 0 \(1024 bytes"):
        cann.copy(block + 1020, HOST_ADDRESS, 8, cann.H2D)
    with refused("source: out of bounds"):
        cann.copy(HOST_ADDRESS, block, 1025, cann.D2H)
    with refused("copy of 8 bytes to a destination of 4"):
        cann.copy(block, HOST_ADDRESS, 8, cann.H2D, room=4)


def test_use_after_free():
    address = cann.malloc(1024)
    cann.free(address)
    with refused("use after free of allocation"):
        cann.copy(address + 100, HOST_ADDRESS, 4, cann.H2D)
    with refused("freed twice"):
        cann.free(address)
    # Its address is not given out again soon, so that the fault stays visible.
    again = cann.malloc(1024)
    assert again != address
    cann.free(again)


def test_copies_that_lie_about_their_ends(block):
    with refused("destination should be device memory"):
        cann.copy(HOST_ADDRESS, HOST_ADDRESS + 8, 4, cann.H2D)
    with refused("source should be host memory"):
        cann.copy(block, block + 8, 4, cann.H2D)


def test_copies_between_devices(block):
    cann.set_device(5)
    there = cann.malloc(1024)
    on = cann.stream()
    with refused("copy from device 5 to device 0 without a stream"):
        cann.copy(block, there, 4, cann.D2D)
    with refused("before aclrtDeviceEnablePeerAccess"):
        cann.copy(block, there, 4, cann.D2D, on=on)
    cann.call("aclrtDeviceEnablePeerAccess", 0, 0)
    cann.copy(block, there, 4, cann.D2D, on=on)
    cann.free(there)


def test_unknown_streams_and_devices():
    on = cann.stream()
    cann.call("aclrtDestroyStream", on)
    with refused("no such stream"):
        cann.call("aclrtSynchronizeStream", on)
    with refused("device 8 of 8"):
        cann.set_device(8)


def test_memory_is_limited():
    with pytest.raises(cann.CannError, match=r"out of memory on device 0.*ASCEND_MOE_SOFTNPU_MEMORY") as caught:
        cann.malloc(5 << 30)
    assert caught.value.code == cann.OUT_OF_MEMORY
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 << 30, dtype=torch.uint8, device="npu")


def test_what_is_not_emulated_says_so():
    with refused("aclrtBinaryLoadFromData is not emulated"):
        cann.call("aclrtBinaryLoadFromData")
    import torch_npu

    with pytest.raises(RuntimeError, match="aclnnFastGelu"):
        torch_npu.fast_gelu(torch.ones(4, device="npu"))


def test_plain_operators_refuse_tensors_of_several_devices():
    x = torch.ones(2, 4, device="npu:0")
    for other in (torch.ones(2, 4), torch.ones(2, 4, device="npu:1")):
        with pytest.raises(RuntimeError, match=rf"same device, but aten::add.Tensor got npu:0 and {other.device}"):
            x + other
    with pytest.raises(RuntimeError, match="same device, but aten::cat got npu:0 and cpu"):
        torch.cat([x, torch.ones(2, 4)])
    assert (x + torch.tensor(2)).sum().item() == 24  # a CPU scalar is fine
    assert x[torch.tensor([1])].shape == (1, 4)  # so are CPU indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_new_floats_are_nan(dtype):
    assert torch.empty(3, 5, dtype=dtype, device="npu").float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_new_integers_are_marked(dtype):
    fresh = torch.empty(3, dtype=dtype, device="npu").cpu()
    assert (fresh.view(torch.uint8) == 0xAA).all()


def test_memory_that_is_freed_is_found_by_operators():
    """With torch's cache off, each tensor is an allocation of the runtime."""
    code = """
import torch
x = torch.ones(4, device="npu")
view = torch.empty(0, device="npu").set_(x.untyped_storage(), 0, (4,))
import cann
cann.free(x.data_ptr())
try:
    view + 1
except RuntimeError as error:
    print(error)
"""
    done = cann.run_python(code, PYTORCH_NO_NPU_MEMORY_CACHING="1")
    assert "use after free" in done.stdout, done.stderr


def test_expandable_segments():
    """Memory in pieces, as torch_npu maps it with expandable_segments."""
    code = """
import torch
small = torch.ones(1 << 20, device="npu")
large = torch.full((30 << 20,), 2.0, device="npu")  # over several pieces
assert (large + 1).sum().item() == 3 * (30 << 20)
del large
torch.npu.empty_cache()
again = torch.zeros(25 << 20, device="npu")
print(all(segment["is_expandable"] for segment in torch.npu.memory_snapshot()))
print(again.sum().item() + small.sum().item())
"""
    done = cann.run_python(code, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    assert done.stdout.splitlines()[-2:] == ["True", str(float(1 << 20))], done.stderr


ALLOCATE = """
import cann
cann.set_device(0)
for n in range(1, 5):
    try:
        cann.malloc(16)
    except cann.CannError as error:
        print(n, error.code, error)
"""


def test_out_of_memory_on_demand():
    once = cann.run_python(ALLOCATE, ASCEND_MOE_SOFTNPU_FAULTS="oom@3")
    assert once.stdout == "3 207001 softnpu: out of memory by ASCEND_MOE_SOFTNPU_FAULTS\n"
    onwards = cann.run_python(ALLOCATE, ASCEND_MOE_SOFTNPU_FAULTS="oom@3+")
    assert [line.split()[0] for line in onwards.stdout.splitlines()] == ["3", "4"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FAULTS", "oom@x", "has 'oom@x'"),
        ("FAULTS", "explode@3", "has 'explode@3'"),
        ("MEMORY", "lots", "is not a size such as 4G or 512M"),
        ("SOC", "B7", "is not A2, A3 or a SoC's full name"),
    ],
)
def test_wrong_settings_are_refused(name, value, message):
    done = cann.run_python(
        "import ctypes; ctypes.CDLL('libascendcl.so').aclInit(None)", **{f"ASCEND_MOE_SOFTNPU_{name}": value}
    )
    assert done.returncode != 0
    assert message in done.stderr


def test_settings():
    code = """
import ctypes
acl = ctypes.CDLL("libascendcl.so")
acl.aclrtGetSocName.restype = ctypes.c_char_p
count, free, total = ctypes.c_uint32(), ctypes.c_size_t(), ctypes.c_size_t()
acl.aclrtGetDeviceCount(ctypes.byref(count))
acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total))
print(acl.aclrtGetSocName().decode(), count.value, total.value)
"""
    done = cann.run_python(
        code, ASCEND_MOE_SOFTNPU_SOC="A3", ASCEND_MOE_SOFTNPU_DEVICES="2", ASCEND_MOE_SOFTNPU_MEMORY="1.5G"
    )
    assert done.stdout.split() == ["Ascend910_9391", "2", str(3 << 29)], done.stderr
