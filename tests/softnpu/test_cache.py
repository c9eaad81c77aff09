"""Caches of keys and values: what is written, and what is not touched."""

import pytest
import torch
import torch_npu
from test_rotary import interleaved
from torch_npu.op_plugin.atb import _atb_ops  # noqa: F401  loads the atb operators

DTYPES = [torch.float16, torch.bfloat16]
SLOTS = [7, -1, 0, 11, -1, 4]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_reshape_and_cache(dtype):
    """Keys are a slice of a wider tensor, as an attention layer gives them; values have another width."""
    both = torch.randint(-99, 99, (6, 2, 9)).to(dtype)
    caches = [torch.randint(-99, 99, (3, 4, 2, width)).to(dtype) for width in (5, 4)]
    on_npu = [cache.npu() for cache in caches]
    key, value = both.npu().split([5, 4], dim=-1)
    torch_npu._npu_reshape_and_cache(key, value, *on_npu, torch.tensor(SLOTS, dtype=torch.int32).npu())
    for cache, rows, given in zip(caches, both.split([5, 4], dim=-1), on_npu, strict=True):
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                cache[slot // 4, slot % 4] = rows[token]
        assert torch.equal(given.cpu(), cache)


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (torch.tensor([12], dtype=torch.int32), "slot_indices has 12; the cache ends at 11"),
        (torch.tensor([1]), "wanted int32"),
        (torch.tensor([1, 2], dtype=torch.int32), r"wanted int32 \(1,\)"),
    ],
)
def test_reshape_and_cache_refuses(slots, text):
    key, cache = torch.zeros(1, 2, 5).npu(), torch.zeros(3, 4, 2, 5).npu()
    with pytest.raises(ValueError, match=text):
        torch_npu._npu_reshape_and_cache(key, key, cache, cache.clone(), slots.npu())


def test_reshape_and_cache_refuses_another_shape():
    wide, cache = torch.zeros(1, 2, 6).npu(), torch.zeros(3, 4, 2, 5).npu()
    slots = torch.tensor([0], dtype=torch.int32).npu()
    with pytest.raises(ValueError, match=r"tokens are torch.float32 \(1, 2, 6\)"):
        torch_npu._npu_reshape_and_cache(wide, wide, cache, cache.clone(), slots)


@pytest.mark.parametrize("cumsum", [False, True])
@pytest.mark.parametrize("starts", [None, [0, 4, 8]])
def test_paged_cache_load(starts, cumsum):
    table = torch.tensor([[5, 0, 3], [2, 4, 1], [6, 7, 5]], dtype=torch.int32)
    lengths = [5, 0, 3]
    caches = [torch.randn(8, 4, 1, width).bfloat16() for width in (6, 2)]
    outs = [torch.full((8, 1, width), torch.nan).bfloat16().npu() for width in (6, 2)]
    given = [0, 5, 5, 8] if cumsum else lengths
    torch_npu.atb.npu_paged_cache_load(
        *(cache.npu() for cache in caches),
        table.npu(),
        torch.tensor(given, dtype=torch.int32).npu(),
        seq_starts=None if starts is None else torch.tensor(starts, dtype=torch.int32).npu(),
        cumsum=cumsum,
        key=outs[0],
        value=outs[1],
    )
    for cache, out in zip(caches, outs, strict=True):
        rows = []
        for b, length in enumerate(lengths):
            first = starts[b] if starts else 0
            rows += [cache[table[b, t // 4], t % 4] for t in range(first, first + length)]
        assert torch.equal(out.cpu(), torch.stack(rows))


def rms_norm(x, gamma, epsilon):
    wide = x.double()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()).to(x.dtype)


@pytest.mark.parametrize("output_kv", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["Norm", "PA", "PA_BNSD", "PA_NZ"])
def test_kv_rmsnorm_rope_cache(mode, dtype, output_kv):
    b, s, dv, dk = (2, 3, 48, 16)
    kv, gamma = torch.randn(b, 1, s, dv + dk).to(dtype), torch.randn(dv).to(dtype)
    cos, sin = torch.randn(b, 1, s, dk).to(dtype), torch.randn(b, 1, s, dk).to(dtype)
    sizes = (b, 1, 5) if mode == "Norm" else (3, 4, 1)
    index = torch.tensor([[4, -1, 0], [-1, 2, 1]]) if mode == "Norm" else torch.tensor(SLOTS)
    caches = [torch.randn(*sizes, width).to(dtype) for width in (dk, dv)]
    on_npu = [cache.npu() for cache in caches]
    _, _, k_out, ckv_out = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(), gamma.npu(), cos.npu(), sin.npu(), index.npu(), *on_npu, epsilon=1e-5, cache_mode=mode,
        is_output_kv=output_kv,
    )  # fmt: skip
    k, ckv = interleaved(kv[..., dv:], cos, sin), rms_norm(kv[..., :dv], gamma, 1e-5)
    for cache, values, given in zip(caches, (k, ckv), on_npu, strict=True):
        for token, slot in enumerate(index.flatten().tolist()):
            row = values[token // s, 0, token % s]
            if slot < 0:
                continue
            if mode == "Norm":
                cache[token // s, 0, slot] = row
            elif mode == "PA_NZ":
                for d, value in enumerate(row):  # [block, D / 16, position, 16]
                    cache[slot // 4].view(-1)[d // 16 * 4 * 16 + slot % 4 * 16 + d % 16] = value
            else:
                cache[slot // 4, slot % 4, 0] = row
        torch.testing.assert_close(given.cpu(), cache)
    for out, values in ((k_out, k), (ckv_out, ckv)):
        if output_kv:
            torch.testing.assert_close(out.cpu(), values)
        else:
            assert out.shape == values.shape
            assert out.isnan().all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cache_mode": "PA_BLK_NZ"}, "cache_mode = PA_BLK_NZ is not emulated"),
        ({"c_kv_scale": torch.ones(4).npu()}, "c_kv_scale = a tensor is not emulated"),
        ({"index": torch.tensor([12]).npu()}, "index has values from 12 to 12"),
        ({"cos": torch.zeros(2, 1, 1, 2).half().npu()}, "leaves 2 to rotate; cos is"),
    ],
)
def test_kv_rmsnorm_rope_cache_refuses(change, text):
    arguments = {
        "kv": torch.zeros(1, 1, 1, 6).half(),
        "gamma": torch.zeros(4).half(),
        "cos": torch.zeros(1, 1, 1, 2).half(),
        "sin": torch.zeros(1, 1, 1, 2).half(),
        "index": torch.tensor([0]),
        "k_cache": torch.zeros(3, 4, 1, 2).half(),
        "ckv_cache": torch.zeros(3, 4, 1, 4).half(),
    }
    with pytest.raises(RuntimeError, match=text):
        torch_npu.npu_kv_rmsnorm_rope_cache(
            **{"cache_mode": "PA", **{n: t.npu() for n, t in arguments.items()}, **change}
        )
