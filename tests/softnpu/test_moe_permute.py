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


def finalized(x, idx, skip1, skip2, bias, scales, experts, mode, k):
    """The documentation's formula, in float64."""
    tokens, rows = len(idx) // k, x.double().flatten(0, -2)
    out = torch.zeros(tokens, x.shape[-1], dtype=torch.float64)
    for t in range(tokens):
        for extra in (skip1, skip2):
            if extra is not None:
                out[t] += extra[t].double()
        for j in range(k):
            row = idx[j * tokens + t] if mode < 2 else idx[t * k + j]
            if row == -1:
                continue
            part = rows[row] + (0 if bias is None else bias[experts[t, j]].double())
            out[t] += part if scales is None else part * scales[t, j].double()
    return out.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("extras", ["none", "skip", "all", "no scales"])
def test_finalize_routing(dtype, mode, extras):
    tokens, k, experts, capacity, hidden = 5, 2, 3, 2, 6
    padded = mode in (1, 3)
    x = torch.randn((experts, capacity, hidden) if padded else (tokens * k, hidden)).to(dtype)
    idx = torch.randperm(tokens * k).to(torch.int32)
    if padded:
        idx[idx >= experts * capacity] = -1
    skip1, skip2 = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    bias, chosen = torch.randn(experts, hidden).to(dtype), torch.randint(0, experts, (tokens, k), dtype=torch.int32)
    scales = None if extras == "no scales" else torch.rand(tokens, k).to(dtype)
    given = [skip1 if extras in ("skip", "all") else None, skip2 if extras == "all" else None]
    given += [bias if extras == "all" else None]
    out = torch_npu.npu_moe_finalize_routing(
        x.npu(), *(None if t is None else t.npu() for t in (*given, scales)), idx.npu(), chosen.npu(), mode, k
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu(), finalized(x, idx.tolist(), *given, scales, chosen, mode, k))


def test_finalize_routing_with_float_scales():
    x, idx, scales = torch.randn(4, 3).bfloat16(), torch.randperm(4).int(), torch.rand(2, 2)
    out = torch_npu.npu_moe_finalize_routing(x.npu(), None, None, None, scales.npu(), idx.npu(), None, 2)
    torch.testing.assert_close(out.cpu(), finalized(x, idx.tolist(), None, None, None, scales, None, 2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_scales", [False, True])
def test_re_routing(dtype, count_dtype, with_scales):
    counts = torch.tensor([[2, 0, 1], [1, 3, 2]], dtype=count_dtype)
    tokens = (torch.randn(9, 4) * 20).to(dtype)
    scales = torch.rand(9) if with_scales else None
    out, out_scales, index, per_expert = torch_npu.npu_moe_re_routing(
        tokens.npu(), counts.npu(), per_token_scales=None if scales is None else scales.npu()
    )
    # Where they were, by source rank and expert: 0 1 | - | 2, then 3 | 4 5 6 | 7 8.
    order = [0, 1, 3, 4, 5, 6, 2, 7, 8]
    assert torch.equal(out.cpu(), tokens[order])
    assert index.tolist() == order
    assert per_expert.dtype == count_dtype
    assert per_expert.tolist() == [3, 3, 3]
    assert torch.equal(out_scales.cpu(), scales[order]) if with_scales else out_scales.isnan().all()


def test_finalize_and_re_routing_refuse():
    x, idx = torch.randn(4, 3).npu(), torch.tensor([0, 1, 2, 4]).int().npu()
    with pytest.raises(RuntimeError, match=r"aclnnMoeFinalizeRoutingV4.*expanded_src_to_dst_row has values"):
        torch_npu.npu_moe_finalize_routing(x, None, None, None, None, idx, None, 2)
    with pytest.raises(RuntimeError, match=r"expanded_src_to_dst_row has values from -1"):
        torch_npu.npu_moe_finalize_routing(x, None, None, None, None, idx - 1, None, 2)
    with pytest.raises(RuntimeError, match=r"aclnnMoeFinalizeRoutingV4: skip2 without skip1"):
        torch_npu.npu_moe_finalize_routing(x, None, x, None, None, idx, None, 2)
    with pytest.raises(RuntimeError, match=r"adds up to 3, there are 4 tokens"):
        torch_npu.npu_moe_re_routing(x, torch.tensor([[1, 2]]).npu())
    with pytest.raises(RuntimeError, match=r"idx_type = 1 is not emulated"):
        torch_npu.npu_moe_re_routing(x, torch.tensor([[2, 2]]).npu(), idx_type=1)
