"""Gating operators against a loop over tokens, from the documentation's formulas."""

import pytest
import torch
import torch_npu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def best(scores: list[float], k: int) -> list[int]:
    """Indices of the k best, the lower one first among equals."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:k]


def gate(row, bias, k, k_group, group_count, mode, renorm, norm_type, factor, eps):
    norm = row.softmax(0) if norm_type == 0 else row.sigmoid()
    scores = (norm if bias is None else norm + bias).tolist()
    size = len(scores) // group_count
    groups = [scores[g * size : (g + 1) * size] for g in range(group_count)]
    worth = [max(g) if mode == 0 else torch.tensor(sorted(g)[-2:]).sum().item() for g in groups]
    allowed = best(worth, k_group)
    chosen = best([s if i // size in allowed else float("-inf") for i, s in enumerate(scores)], k)
    weights = norm[chosen]
    if norm_type == 1 or renorm:
        weights = weights / (weights.sum() + eps)
    return weights * factor, chosen, norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [(1, 1, 0), (2, 4, 0), (4, 8, 1)], ids=str)
@pytest.mark.parametrize(("norm_type", "renorm"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_top_k(dtype, groups, norm_type, renorm, with_bias):
    k_group, group_count, mode = groups
    x = torch.randn(5, 48).to(dtype)
    bias = (torch.randn(48) - 4).to(dtype) if with_bias else None  # negative scores
    y, ids, out = torch_npu.npu_moe_gating_top_k(
        x.npu(),
        6,
        bias=bias.npu() if with_bias else None,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=mode,
        renorm=renorm,
        norm_type=norm_type,
        out_flag=True,
        routed_scaling_factor=2.5,
        eps=1e-6,
    )
    assert (y.dtype, ids.dtype, out.dtype) == (dtype, torch.int32, torch.float32)
    for t in range(5):
        row_bias = bias.float() if with_bias else None
        wanted = gate(x[t].float(), row_bias, 6, k_group, group_count, mode, renorm, norm_type, 2.5, 1e-6)
        assert ids[t].tolist() == wanted[1]
        torch.testing.assert_close(y[t].cpu(), wanted[0].to(dtype))
        torch.testing.assert_close(out[t].cpu(), wanted[2])


def test_equal_scores_take_the_lower_expert_and_out_is_optional():
    y, ids, out = torch_npu.npu_moe_gating_top_k(torch.zeros(3, 16).npu(), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert (y == 1 / 16).all()
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "k"), [((7, 9), 3), ((1, 4), 4), ((2, 3, 5), 2), ((0, 4), 2)], ids=str)
@pytest.mark.parametrize("with_finished", [False, True])
def test_softmax(shape, k, dtype, with_finished):
    x = torch.randn(shape).to(dtype)
    finished = torch.rand(shape[:-1]) < 0.5
    y, ids, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), finished.npu() if with_finished else None, k)
    assert y.shape == ids.shape == rows.shape == (*shape[:-1], k)
    assert (y.dtype, ids.dtype, rows.dtype) == (dtype, torch.int32, torch.int32)
    count = x.numel() // shape[-1]
    for t in range(count):
        row = x.view(count, -1)[t].float().softmax(0)
        chosen = best(row.tolist(), k)
        torch.testing.assert_close(y.view(count, k)[t].cpu(), row[chosen].to(dtype))
        done = with_finished and finished.view(-1)[t].item()
        assert ids.view(count, k)[t].tolist() == ([shape[-1]] * k if done else chosen)
        assert rows.view(count, k)[t].tolist() == [j * count + t for j in range(k)]


@pytest.mark.parametrize("renorm", [0, 1])
def test_softmax_version_2(renorm):
    x = torch.randn(6, 10)
    y, ids, result = torch_npu.npu_moe_gating_top_k_softmax_v2(x.npu(), k=3, renorm=renorm, output_softmax=renorm == 0)
    for t in range(6):
        chosen = best(x[t].tolist(), 3)
        wanted = x[t].softmax(0)[chosen] if renorm == 0 else x[t][chosen].softmax(0)
        assert ids[t].tolist() == chosen
        torch.testing.assert_close(y[t].cpu(), wanted)
    if renorm == 0:
        torch.testing.assert_close(result.cpu(), x.softmax(-1))


REFUSED = {
    "k = 9 of 8": {"k": 9},
    "norm_type = 2 is not emulated": {"norm_type": 2},
    "group_count = 3 of 8": {"group_count": 3},
    "k_group = 3 of 2": {"k_group": 3, "group_count": 2},
    "renorm = 2": {"renorm": 2},
    "an empty one": {"x": torch.zeros(0, 8)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_argument(message):
    arguments = {"x": torch.zeros(2, 8), "k": 2, **REFUSED[message]}
    with pytest.raises(RuntimeError, match=f"aclnnMoeGatingTopK.*{message}"):
        torch_npu.npu_moe_gating_top_k(arguments.pop("x").npu(), **arguments)
