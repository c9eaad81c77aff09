"""aclnn functions of the norm family, called by torch_npu's own host code."""

import pytest
import torch
import torch_npu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 16), (0, 16)])
def test_rms_norm(shape, dtype):
    x, gamma = torch.randn(shape, dtype=dtype), torch.randn(16, dtype=dtype)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    wide = x.double()
    scale = (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(y.cpu(), (wide * scale * gamma.double()).to(dtype))
    torch.testing.assert_close(rstd.cpu(), scale.float())
