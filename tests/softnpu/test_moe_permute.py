"""token_permute, token_unpermute and finalize_routing."""

import pytest
import torch
import torch_npu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "k", "kept"), [(9, 3, 0), (9, 3, 20), (5, 2, -3), (4, 1, 4), (0, 2, 0)])
def test_permute(tokens, k, kept, dtype, index_dtype):
    x, indices = torch.randn(tokens, 6).to(dtype), torch.randint(0, 4, (tokens, k), dtype=index_dtype)
    out, positions = torch_npu.npu_moe_token_permute(x.npu(), indices.npu(), kept)
    order = sorted(range(tokens * k), key=lambda p: indices.flatten()[p].item())
    rows = order[:kept] if kept else order
    assert out.dtype == dtype
    assert positions.dtype == torch.int32
    assert torch.equal(out.cpu(), x[[p // k for p in rows]])
    assert positions.tolist() == [order.index(p) for p in range(tokens * k)]


def weighted(permuted, positions, probs):
    """out[t] = sum over k of probs[t, k] * permuted[positions[t * K + k]], in float64; rows that are not there: 0."""
    k = probs.shape[1]
    out = torch.zeros(probs.shape[0], permuted.shape[1], dtype=torch.float64)
    for t in range(probs.shape[0]):
        for j in range(k):
            row = positions[t * k + j]
            if row < permuted.shape[0] and probs[t, j] != 0:
                out[t] += probs[t, j].double() * permuted[row].double()
    return out.to(permuted.dtype)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("float_probs", [False, True])
@pytest.mark.parametrize(("tokens", "k", "dropped"), [(7, 3, 0), (6, 4, 5), (1, 1, 0), (0, 2, 0)])
def test_unpermute(tokens, k, dropped, dtype, float_probs, inference):
    permuted = torch.randn(tokens * k - dropped, 10).to(dtype)
    positions = torch.randperm(tokens * k).to(torch.int32)
    probs = torch.rand(tokens, k).to(torch.float32 if float_probs else dtype)
    with torch.inference_mode(inference):
        out = torch_npu.npu_moe_token_unpermute(permuted.npu(), positions.npu(), probs=probs.npu())
    assert out.dtype == dtype
    assert out.shape == (tokens, 10)
    torch.testing.assert_close(out.cpu(), weighted(permuted, positions.tolist(), probs))


def test_unpermute_without_weights_and_with_zero_weights():
    x = torch.randn(4, 3)
    assert torch.equal(
        torch_npu.npu_moe_token_unpermute(x.npu(), torch.tensor([2, 0, 3, 1]).int().npu()).cpu(), x[[2, 0, 3, 1]]
    )
    x[1] = float("nan")
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    out = torch_npu.npu_moe_token_unpermute(x.npu(), torch.tensor([0, 1, 2, 3]).int().npu(), probs=probs.npu())
    torch.testing.assert_close(out.cpu(), torch.stack([x[0], (x[2] + x[3]) / 2]))


def test_permute_and_back():
    x, ids = torch.randn(8, 5), torch.stack([torch.randperm(6)[:2] for _ in range(8)])
    rows, positions = torch_npu.npu_moe_token_permute(x.npu(), ids.npu())
    back = torch_npu.npu_moe_token_unpermute(rows, positions, probs=torch.full((8, 2), 0.5).npu())
    torch.testing.assert_close(back.cpu(), x)


def test_refusals_name_the_argument():
    x, ids = torch.randn(2, 4).npu(), torch.tensor([[0, 1], [-1, 1]]).npu()
    with pytest.raises(RuntimeError, match=r"aclnnMoeTokenPermute.*indices has values from -1"):
        torch_npu.npu_moe_token_permute(x, ids)
    positions = torch.tensor([0, -1]).int().npu()
    with pytest.raises(RuntimeError, match=r"aclnnMoeTokenUnpermute.*sorted_indices has values from -1"):
        torch_npu.npu_moe_token_unpermute(x, positions, probs=torch.ones(1, 2).npu())
