"""Which kernel a name is on which device, and what a name that cannot be says. That the kernels compute the right thing
is tested elsewhere; here no kernel runs."""

from __future__ import annotations

import pytest

from vllm_ascend_moe.errors import InvalidValueError, MissingDependencyError, UnsupportedError
from vllm_ascend_moe.experts import select
from vllm_ascend_moe.experts.native import NativeExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.experts.select import make_batched_experts, make_rows_experts, resolve_experts
from vllm_ascend_moe.experts.torch_form import TorchExperts


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch):
    """have(extension=..., triton=...): what is installed."""

    def replace(*, extension: bool = True, triton: bool = True) -> None:
        monkeypatch.setattr(select, "native_available", lambda: extension)
        monkeypatch.setattr(select, "find_spec", lambda name: object() if name == "triton" and triton else None)

    replace()
    return replace


@pytest.mark.parametrize(
    ("device", "extension", "triton", "expected"),
    [
        ("cpu", True, True, "native"),
        ("cpu", False, True, "torch"),
        ("cuda", True, True, "triton"),
        ("cuda", True, False, "torch"),
        ("npu", True, True, "torch"),
    ],
)
def test_auto(device: str, extension: bool, triton: bool, expected: str, have) -> None:
    have(extension=extension, triton=triton)
    assert resolve_experts("auto", device) == expected


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("native", "cpu"),
        ("torch", "cpu"),
        ("torch", "npu"),
        ("reference", "cuda"),
        ("triton", "cuda"),
        ("triton", "npu"),
    ],
)
def test_a_name_that_fits_the_device_is_that_kernel(name: str, device: str, have) -> None:
    assert resolve_experts(name, device) == name


@pytest.mark.parametrize(
    ("name", "device", "error", "text"),
    [
        ("fast", "cpu", InvalidValueError, "experts = 'fast', but it must be one of auto, native"),
        ("native", "cuda", UnsupportedError, "runs on CPU, but the device is cuda"),
        ("triton", "cpu", UnsupportedError, "runs on CUDA and NPU devices, but the device is cpu"),
    ],
)
def test_refused(name: str, device: str, error: type[Exception], text: str, have) -> None:
    with pytest.raises(error, match=text):
        make_rows_experts(name, device)
    with pytest.raises(error, match=text):
        make_batched_experts(name, device)


def test_what_is_not_installed_is_named(have) -> None:
    have(extension=False, triton=False)
    with pytest.raises(MissingDependencyError, match="pip install --no-build-isolation"):
        make_rows_experts("native", "cpu")
    with pytest.raises(MissingDependencyError, match="needs triton"):
        make_batched_experts("triton", "cuda")


@pytest.mark.parametrize("make", [make_rows_experts, make_batched_experts])
def test_kernels_without_triton(make, have) -> None:
    kinds = {"native": NativeExperts, "torch": TorchExperts, "reference": ReferenceExperts}
    for name, kind in kinds.items():
        assert type(make(name, "cpu")) is kind
