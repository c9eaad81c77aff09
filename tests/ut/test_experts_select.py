"""Which kernel a name is on which device, and what a name that cannot be says. That the kernels compute the right thing
is tested elsewhere; here no kernel runs."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_moe.errors import InvalidValueError, MissingDependencyError, UnsupportedError
from vllm_ascend_moe.experts import npu, select
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NativeExperts
from vllm_ascend_moe.experts.npu import NpuExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.experts.select import make_batched_experts, make_rows_experts, resolve_experts
from vllm_ascend_moe.experts.torch_form import TorchExperts


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch):
    """have(extension=..., triton=..., torch_npu=...): what is installed."""

    def replace(*, extension: bool = True, triton: bool = True, torch_npu: bool = True) -> None:
        installed = {"triton": triton, "torch_npu": torch_npu}
        monkeypatch.setattr(select, "native_available", lambda: extension)
        monkeypatch.setattr(select, "find_spec", lambda name: object() if installed[name] else None)
        if torch_npu:  # whose operators the kernel looks up when it is made
            monkeypatch.setattr(npu, "npu_operator", lambda name: name)
            monkeypatch.setattr(npu, "token_unpermute_operator", lambda: "unpermute")

    replace()
    return replace


@pytest.mark.parametrize(
    ("device", "installed", "expected"),
    [
        ("cpu", {"torch_npu": False}, "native"),
        ("cpu", {"extension": False}, "torch"),
        ("cuda", {"torch_npu": False}, "triton"),
        ("cuda", {"triton": False}, "torch"),
        ("npu", {"triton": False}, "npu"),
        ("npu", {"torch_npu": False}, "torch"),
    ],
    ids=str,
)
def test_auto(device: str, installed: dict[str, bool], expected: str, have) -> None:
    have(**installed)
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
        ("npu", "npu"),
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
        ("npu", "cpu", UnsupportedError, "runs on NPU devices, but the device is cpu"),
        ("npu", "cuda", UnsupportedError, "runs on NPU devices, but the device is cuda"),
    ],
)
def test_refused(name: str, device: str, error: type[Exception], text: str, have) -> None:
    with pytest.raises(error, match=text):
        make_rows_experts(name, device)
    with pytest.raises(error, match=text):
        make_batched_experts(name, device)


def test_what_is_not_installed_is_named(have) -> None:
    have(extension=False, triton=False, torch_npu=False)
    with pytest.raises(MissingDependencyError, match="pip install --no-build-isolation"):
        make_rows_experts("native", "cpu")
    with pytest.raises(MissingDependencyError, match="needs triton"):
        make_batched_experts("triton", "cuda")
    with pytest.raises(MissingDependencyError, match="Install the torch-npu"):
        make_rows_experts("npu", "npu")


def test_npu_experts_without_torch_npu_say_what_to_install() -> None:
    """Where the kernel is made by hand; torch_npu is not in the environment of these tests."""
    row = torch.zeros(1, 4), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    weights = ExpertWeights(w13=torch.zeros(1, 4, 4), w2=torch.zeros(1, 4, 2))
    with pytest.raises(MissingDependencyError, match=r"needs torch_npu \(No module named"):
        NpuExperts().apply(*row, weights)


@pytest.mark.parametrize("make", [make_rows_experts, make_batched_experts])
def test_kernels_without_triton(make, have) -> None:
    kinds = {"native": NativeExperts, "torch": TorchExperts, "reference": ReferenceExperts}
    for name, kind in kinds.items():
        assert type(make(name, "cpu")) is kind
    for name in ("auto", "npu"):
        assert type(make(name, "npu")) is NpuExperts
