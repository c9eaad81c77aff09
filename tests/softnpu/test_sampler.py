"""Filters for sampling, against sets of tokens chosen one by one."""

import math

import pytest
import torch
import torch_npu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kept(row, k, p):
    """The tokens that stay: all whose logit is at least the k-th largest, less the least likely of them while what is
    dropped has a probability of at most 1 - p; the most likely one always stays."""
    values = row.double().tolist()
    tokens = list(range(len(values)))
    if k is not None:
        least = sorted(values)[-k]
        tokens = [t for t in tokens if values[t] >= least]
    if p is not None:
        total = sum(math.exp(values[t]) for t in tokens)
        dropped = 0.0
        for token in sorted(tokens, key=lambda t: (values[t], t)):
            dropped += math.exp(values[token]) / total
            if dropped > 1 - p or len(tokens) == 1:
                break
            tokens.remove(token)
    return set(tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_k", "with_p"), [(True, False), (False, True), (True, True)])
def test_top_k_top_p(with_k, with_p, dtype):
    rows, vocabulary = 24, 37
    logits = torch.stack([torch.randperm(vocabulary) for _ in range(rows)]).to(dtype) / 4  # no two equal
    k = torch.randint(1, vocabulary + 1, (rows,), dtype=torch.int32)
    p = torch.rand(rows).to(dtype)
    k[0], p[1], p[2] = vocabulary, 0, 1  # all stay; one stays; all stay
    out = torch_npu.npu_top_k_top_p(logits.npu(), p=p.npu() if with_p else None, k=k.npu() if with_k else None).cpu()
    assert out.dtype == dtype
    for b in range(rows):
        stays = kept(logits[b], int(k[b]) if with_k else None, float(p[b]) if with_p else None)
        wanted = torch.tensor([x if t in stays else -math.inf for t, x in enumerate(logits[b].tolist())], dtype=dtype)
        assert torch.equal(out[b], wanted), b


def test_equal_logits_at_the_kth_place_stay():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]).npu()
    out = torch_npu.npu_top_k_top_p(logits, k=torch.tensor([2], dtype=torch.int32).npu())
    assert out.tolist() == [[-math.inf, 3, 2, 2, -math.inf]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "both left out|not supported|None"),
        ({"k": torch.tensor([6, 1], dtype=torch.int32)}, "k has values from 1 to 6; allowed are 1 to 5"),
        ({"k": torch.tensor([1, 1])}, "not int32"),
        ({"p": torch.ones(2).half()}, "p is"),
        ({"p": torch.ones(3)}, r"is \[3\]"),
    ],
)
def test_refusals(arguments, text):
    with pytest.raises(RuntimeError, match=text):
        torch_npu.npu_top_k_top_p(torch.zeros(2, 5).npu(), **{name: t.npu() for name, t in arguments.items()})
