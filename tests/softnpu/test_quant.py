"""Dynamic quantisation and swiglu."""

import pytest
import torch
import torch_npu


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1) / 127
    return torch.round(x / scale.unsqueeze(-1)).nan_to_num(0).to(torch.int8), scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 17), (2, 3, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quant(shape, dtype, smooth):
    x, scales = (torch.randn(shape) * 3).to(dtype), (torch.rand(shape[-1]) + 0.5).to(dtype)
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=scales.npu() if smooth else None)
    values, wanted = quantize(x.float() * scales.float() if smooth else x.float())
    assert y.dtype == torch.int8
    assert torch.equal(y.cpu(), values)
    assert scale.dtype == torch.float32
    assert torch.equal(scale.cpu(), wanted)


def test_groups_have_their_own_smooth_scales():
    x, scales = torch.randn(6, 4).bfloat16(), (torch.rand(3, 4) + 0.5).bfloat16()
    groups = torch.tensor([2, 2, 6], dtype=torch.int32)
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=scales.npu(), group_index=groups.npu())
    values, wanted = quantize(x.float() * scales[[0, 0, 2, 2, 2, 2]].float())
    assert torch.equal(y.cpu(), values)
    assert torch.equal(scale.cpu(), wanted)


def test_zero_rows_and_rows_with_one_value():
    x = torch.zeros(3, 8).bfloat16()
    x[1, 5], x[2] = -2.0, 7.0
    y, scale = torch_npu.npu_dynamic_quant(x.npu())
    assert y.tolist() == [[0] * 8, [0, 0, 0, 0, 0, -127, 0, 0], [127] * 8]
    torch.testing.assert_close(scale.cpu(), torch.tensor([0, 2 / 127, 7 / 127]))


def test_asymmetric():
    x = torch.randn(4, 32).half()
    y, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(x.npu())
    low, high = x.float().amin(-1), x.float().amax(-1)
    torch.testing.assert_close(scale.cpu(), (high - low) / 255)
    torch.testing.assert_close(offset.cpu(), 127 - high / ((high - low) / 255))
    assert y.amax() == 127
    assert y.amin() == -128
    back = (y.cpu().float() - offset.cpu()[:, None]) * scale.cpu()[:, None]
    torch.testing.assert_close(back, x.float(), atol=scale.max().item(), rtol=0)


def test_refusals_name_the_argument():
    x = torch.randn(2, 16).bfloat16().npu()
    with pytest.raises(RuntimeError, match=r"aclnnDynamicQuantV2: dst_type .* is not emulated"):
        torch_npu.npu_dynamic_quant(x, dst_type=torch.quint4x2)
    with pytest.raises(RuntimeError, match=r"aclnnDynamicQuantV2: x is Float"):
        torch_npu.npu_dynamic_quant(x.float())
    groups = torch.tensor([1, 3], dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match=r"group_index"):
        torch_npu.npu_dynamic_quant(x, smooth_scales=torch.ones(2, 16).bfloat16().npu(), group_index=groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((3, 10), -1), ((4, 2, 6), 1), ((0, 8), -1)], ids=str)
def test_swiglu(shape, dim, dtype):
    x = torch.randn(shape).to(dtype)
    y = torch_npu.npu_swiglu(x.npu(), dim=dim)
    a, b = x.double().chunk(2, dim)
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu(), (a / (1 + (-a).exp()) * b).to(dtype))
