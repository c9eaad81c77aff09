"""What stands around attention: joining partial results, and matrix products of the layers."""

import math

import pytest
import torch
import torch_npu
from torch_npu.op_plugin.atb import _atb_ops  # noqa: F401  loads the atb operators

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("update_type", [0, 1])
def test_attention_update(update_type, dtype):
    """Parts of a softmax join to the whole of it; a part that saw nothing counts nothing."""
    scores, values = torch.randn(6, 9).double(), torch.randn(9, 5).double()
    total_lse = scores.logsumexp(1)
    parts = [(scores[:, s], values[s]) for s in (slice(0, 2), slice(2, 3), slice(3, 9))]
    lse = [s.logsumexp(1).float() for s, _ in parts] + [torch.full((6,), math.inf)]
    outs = [(s.softmax(1) @ v).to(dtype) for s, v in parts] + [torch.zeros(6, 5, dtype=dtype)]
    out, total = torch_npu.npu_attention_update([t.npu() for t in lse], [t.npu() for t in outs], update_type)
    shares = [(s.logsumexp(1) - total_lse).exp().unsqueeze(1) for s, _ in parts]
    wanted = sum(o.double() * share for o, share in zip(outs[:3], shares, strict=True))
    torch.testing.assert_close(out.cpu(), wanted.to(dtype))
    torch.testing.assert_close(out.cpu().double(), scores.softmax(1) @ values, rtol=2e-2, atol=2e-2)
    if update_type == 1:
        torch.testing.assert_close(total.cpu(), total_lse.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perm", [None, [1, 0, 2]])
def test_transpose_batchmatmul(perm, dtype):
    left, right = torch.randn(3, 5, 7).to(dtype), torch.randn(3, 7, 4).to(dtype)
    given = left if perm is None else left.permute(perm).contiguous()
    y = torch_npu.npu_transpose_batchmatmul(given.npu(), right.npu(), perm_x1=perm, perm_y=[1, 0, 2])
    torch.testing.assert_close(y.cpu(), torch.einsum("bmk,bkn->mbn", left.double(), right.double()).to(dtype))


def test_matmul_add():
    x, weight, c = torch.randn(5, 3).half(), torch.randn(5, 4).half(), torch.randn(3, 4)
    on_npu = c.npu()
    torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), on_npu)
    torch.testing.assert_close(on_npu.cpu(), (c.double() + x.double().t() @ weight.double()).float())
