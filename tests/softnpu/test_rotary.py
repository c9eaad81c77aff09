"""Rotary position embeddings, against rotations of complex numbers and the formula of CANN's documentation."""

import pytest
import torch
import torch_npu
from torch_npu.op_plugin.atb import _atb_ops  # noqa: F401  loads the atb operators

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rotated(tensor, head_size, cache, positions, neox):
    """[T, heads * head_size] as pairs that are complex numbers, times cos + i sin."""
    heads = tensor.double().unflatten(1, (-1, head_size))
    half = head_size // 2
    pairs = heads.unflatten(-1, (2, half)).transpose(-1, -2) if neox else heads.unflatten(-1, (half, 2))
    turn = torch.complex(*cache[positions].double().chunk(2, -1)).unsqueeze(1)
    result = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
    return (result.transpose(-1, -2) if neox else result).reshape(tensor.shape).to(tensor.dtype)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rotary_embedding(tokens, dtype, neox):
    query, key, cache = (torch.randn(shape).to(dtype) for shape in ((tokens, 24), (tokens, 16), (9, 8)))
    positions = torch.randint(0, 9, (tokens,))
    q, k = query.npu(), key.npu()
    torch_npu._npu_rotary_embedding(positions.npu(), q, k, 8, cache.npu(), neox)
    torch.testing.assert_close(q.cpu(), rotated(query, 8, cache, positions, neox))
    torch.testing.assert_close(k.cpu(), rotated(key, 8, cache, positions, neox))


def test_rotary_embedding_refuses():
    q = torch.zeros(1, 8).npu()
    with pytest.raises(ValueError, match="cos_sin_cache has 6 columns and head_size is 8"):
        torch_npu._npu_rotary_embedding(torch.tensor([0]).npu(), q, q.clone(), 8, torch.zeros(3, 6).npu(), True)
    with pytest.raises(IndexError, match="out of bounds"):
        torch_npu._npu_rotary_embedding(torch.tensor([3]).npu(), q, q.clone(), 8, torch.zeros(3, 8).npu(), True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(("shape", "angles"), [((2, 3, 4, 8), (1, 1, 4, 8)), ((2, 3, 4, 6), (2, 3, 1, 6))])
def test_rotary_mul(shape, angles, mode, dtype):
    x, r1, r2 = (torch.randn(s).to(dtype) for s in (shape, angles, angles))
    half = shape[-1] // 2
    wanted = torch.empty(shape, dtype=torch.float64)
    cos, sin = (t.double().expand(shape) for t in (r1, r2))
    for d in range(shape[-1]):
        first = d < half if mode == "half" else d % 2 == 0
        step = half if mode == "half" else 1
        other = -x[..., d + step].double() if first else x[..., d - step].double()
        wanted[..., d] = x[..., d].double() * cos[..., d] + other * sin[..., d]
    out = torch_npu.npu_rotary_mul(x.npu(), r1.npu(), r2.npu(), mode)
    torch.testing.assert_close(out.cpu(), wanted.to(dtype))


def interleaved(x, cos, sin):
    """The documentation's formula, element by element."""
    half = x.shape[-1] // 2
    cos, sin = (t.double().expand(x.shape) for t in (cos, sin))
    sorted_x = torch.cat([x.double()[..., 0::2], x.double()[..., 1::2]], -1)
    out = torch.empty_like(sorted_x)
    for d in range(2 * half):
        other = -sorted_x[..., d + half] if d < half else sorted_x[..., d - half]
        out[..., d] = sorted_x[..., d] * cos[..., d] + other * sin[..., d]
    return out.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "angles"), [((3, 2, 1, 8), (3, 1, 1, 8)), ((2, 3, 4, 6), (1, 1, 4, 6))])
def test_interleave_rope(shape, angles, dtype):
    x, cos, sin = (torch.randn(s).to(dtype) for s in (shape, angles, angles))
    out = torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu())
    torch.testing.assert_close(out.cpu(), interleaved(x, cos, sin))


def test_interleave_rope_refuses():
    x = torch.zeros(2, 1, 1, 8).bfloat16().npu()
    with pytest.raises(RuntimeError, match="same, even last dimension"):
        torch_npu.npu_interleave_rope(x, x[..., :6].contiguous(), x[..., :6].contiguous())
