"""Norms with a residual, with a bias, and Gemma's."""

import pytest
import torch
import torch_npu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCHEMA = (
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) "
    "-> (Tensor y ,Tensor rstd, Tensor x)"
)


@pytest.fixture(scope="module")
def add_rms_norm_bias():
    """As vllm-ascend defines it, after the soft NPU has registered its kernel."""
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    library.define(SCHEMA)
    yield torch.ops._C_ascend.npu_add_rms_norm_bias
    library._destroy()


def expected(x1, x2, gamma, beta=None, epsilon=1e-6):
    dims = tuple(range(x1.dim() - gamma.dim(), x1.dim()))
    total = x1.double() + x2.double()
    rstd = 1 / (total.pow(2).mean(dims, keepdim=True) + epsilon).sqrt()
    y = total * rstd * gamma.double() + (0 if beta is None else beta.double())
    return y.to(x1.dtype), rstd.float(), total.to(x1.dtype)


def check(given, wanted):
    """The sum is exact; y has two roundings more than a double has, and rstd may be that of the rounded sum."""
    y, rstd, x = (t.cpu() for t in given)
    torch.testing.assert_close(x, wanted[2], rtol=0, atol=0)
    loose = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[x.dtype]
    torch.testing.assert_close(y, wanted[0], rtol=loose, atol=loose)
    rounded = torch.finfo(x.dtype).eps / 2
    torch.testing.assert_close(rstd, wanted[1], rtol=max(1.01 * rounded, 1e-6), atol=1e-6)


SHAPES = [((5, 16), (16,)), ((2, 3, 7), (7,)), ((2, 3, 7), (3, 7)), ((0, 16), (16,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "tail"), SHAPES)
def test_add_rms_norm(shape, tail, dtype):
    x1, x2, gamma = (torch.randn(s).to(dtype) for s in (shape, shape, tail))
    given = torch_npu.npu_add_rms_norm(x1.npu(), x2.npu(), gamma.npu(), 1e-5)
    check(given, expected(x1, x2, gamma, epsilon=1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shape", "tail"), SHAPES)
def test_add_rms_norm_bias(add_rms_norm_bias, shape, tail, biased, dtype):
    x1, x2, gamma, beta = (torch.randn(s).to(dtype) for s in (shape, shape, tail, tail))
    given = add_rms_norm_bias(x1.npu(), x2.npu(), gamma.npu(), beta.npu() if biased else None, 1e-5)
    assert all(t.device.type == "npu" for t in given)
    check(given, expected(x1, x2, gamma, beta if biased else None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_and_without_bias_round_alike(add_rms_norm_bias, dtype):
    x1, x2, gamma = (torch.randn(s).to(dtype).npu() for s in ((9, 32), (9, 32), (32,)))
    for a, b in zip(add_rms_norm_bias(x1, x2, gamma), torch_npu.npu_add_rms_norm(x1, x2, gamma, 1e-6), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0)


def test_refusals(add_rms_norm_bias):
    x, gamma = torch.zeros(2, 4).npu(), torch.zeros(3).npu()
    with pytest.raises(ValueError, match=r"gamma \(3,\) do not fit"):
        add_rms_norm_bias(x, x, gamma)
    with pytest.raises(RuntimeError, match="gamma"):
        torch_npu.npu_add_rms_norm(x, x, gamma)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rms_norm(dtype):
    x, gamma = torch.randn(5, 16).to(dtype), torch.randn(16).to(dtype)
    y, rstd = torch_npu.npu_gemma_rms_norm(x.npu(), gamma.npu(), 1e-5)
    scale = 1 / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(y.cpu(), (x.double() * scale * (1 + gamma.double())).to(dtype))
    torch.testing.assert_close(rstd.cpu(), scale.float())
