"""npu_fused_infer_attention_score and what goes with it, against attention from its definition."""

import math
from itertools import accumulate

import pytest
import torch
import torch_npu
from attention_reference import attention, band, causal, paginate

DTYPES = [torch.bfloat16, torch.float16]
TRIANGLE = torch.ones(2048, 2048).triu(1).to(torch.int8)


def sequences(lengths, heads, width, dtype=torch.bfloat16):
    return [torch.randn(n, heads, width).to(dtype) for n in lengths]


def expected(queries, keys, values, scale, hide=lambda queries, keys: None, sink=None):
    """Of all sequences: out [T, N, E] and lse [T, N, 1]."""
    triples = zip(queries, keys, values, strict=True)
    results = [attention(q, k, v, scale, hide(len(q), len(k)), sink) for q, k, v in triples]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results]).unsqueeze(-1)


def fused(q, k, v, *, heads, kv_heads, layout="TND", q_lengths=None, kv_lengths=None, mask=TRIANGLE, **others):
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.npu(),
        v.npu(),
        num_heads=heads,
        num_key_value_heads=kv_heads,
        input_layout=layout,
        actual_seq_lengths=q_lengths,
        actual_seq_lengths_kv=kv_lengths,
        atten_mask=None if mask is None else mask.npu(),
        softmax_lse_flag=True,
        **others,
    )
    return out.cpu(), lse.cpu()


def ends(items):
    return list(accumulate(len(item) for item in items))


def check(given, wanted):
    torch.testing.assert_close(given[0], wanted[0])
    torch.testing.assert_close(given[1], wanted[1], rtol=1e-4, atol=1e-4)


CAUSAL = {"sparse_mode": 3}
BAND = {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1}
RULES = [
    pytest.param(CAUSAL, causal, id="causal"),
    pytest.param(BAND, lambda s, n: band(s, n, 3, 1), id="band"),
    pytest.param({"sparse_mode": 2}, lambda s, n: torch.ones(s, n).triu(1).bool(), id="left-up"),
    pytest.param({"mask": None}, lambda s, n: None, id="all"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("arguments", "hide"), RULES)
def test_packed(arguments, hide, dtype):
    """Queries of 0 and 1 tokens, more queries than keys (some see nothing), heads that share keys."""
    q = sequences((3, 1, 0, 5, 4), 4, 24, dtype)
    k, v = (sequences((3, 7, 2, 5, 2), 2, width, dtype) for width in (24, 24))
    given = fused(
        torch.cat(q),
        torch.cat(k),
        torch.cat(v),
        heads=4,
        kv_heads=2,
        scale=0.3,
        q_lengths=ends(q),
        kv_lengths=ends(k),
        **arguments,
    )
    check(given, expected(q, k, v, 0.3, hide))


@pytest.mark.parametrize("form", ["BBH", "BNBD", "NZ"])
@pytest.mark.parametrize(("arguments", "hide"), RULES[:2])
def test_paged(arguments, hide, form):
    """A sequence without keys, one that ends at the end of a block, blocks in any order, NaN where no token is."""
    q = sequences((1, 2, 5, 1), 6, 32)
    k, v = (sequences((9, 8, 17, 0), 3, 32) for _ in range(2))
    (key, table), (value, same) = (paginate(s, 8) for s in (k, v))
    value = torch.full_like(value, math.nan)
    for b, sequence in enumerate(v):  # the same blocks for keys and values
        for i, piece in enumerate(sequence.split(8) if len(sequence) else ()):
            value[table[b, i], : len(piece)] = piece
    assert same.shape == table.shape
    shape = {
        "BBH": lambda t: t.flatten(2),
        "BNBD": lambda t: t.transpose(1, 2).contiguous(),
        "NZ": lambda t: t.unflatten(3, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous(),
    }[form]
    given = fused(
        torch.cat(q), shape(key), shape(value), heads=6, kv_heads=3, scale=0.25, block_table=table.npu(), block_size=8,
        q_lengths=ends(q), kv_lengths=[len(s) for s in k], **arguments
    )  # fmt: skip
    check(given, expected(q, k, v, 0.25, hide))


def test_packed_mla():
    """MLA's prefill: rope parts apart from the rest, values narrower than keys, and a query that is a slice."""
    q, q_rope, k_rope = sequences((4, 2), 2, 40), sequences((4, 2), 2, 8), sequences((6, 2), 2, 8)
    k, v = sequences((6, 2), 2, 16), sequences((6, 2), 2, 24)
    given = fused(
        torch.cat(q)[..., :16], torch.cat(k), torch.cat(v), heads=2, kv_heads=2, scale=0.2, q_lengths=ends(q),
        kv_lengths=ends(k), query_rope=torch.cat(q_rope).npu(), key_rope=torch.cat(k_rope).npu(), **CAUSAL
    )  # fmt: skip
    whole_q = [torch.cat([a[..., :16], b], -1) for a, b in zip(q, q_rope, strict=True)]
    whole_k = [torch.cat([a, b], -1) for a, b in zip(k, k_rope, strict=True)]
    check(given, expected(whole_q, whole_k, v, 0.2, causal))


@pytest.mark.parametrize(
    ("layout", "out_dims"), [("BNSD_NBSD", (2, 0, 1, 3)), ("BSND_NBSD", (2, 0, 1, 3)), ("BNSD", (0, 2, 1, 3))]
)
def test_mla_decode(layout, out_dims):
    """MLA's decode as vllm-ascend calls it: one token a sequence, compressed keys that are the values too, paged."""
    lengths, heads = (5, 1, 9, 0), 4
    q, q_rope = torch.randn(4, 1, heads, 32).bfloat16(), torch.randn(4, 1, heads, 8).bfloat16()
    compressed = [torch.randn(n, 1, 40).bfloat16() for n in lengths]
    cache, table = paginate(compressed, 4)
    nope, rope = (part.transpose(1, 2).contiguous().npu() for part in cache.split([32, 8], -1))
    turn = (lambda t: t.transpose(1, 2).contiguous()) if layout.startswith("BNSD") else lambda t: t
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        turn(q).npu(), nope, nope, query_rope=turn(q_rope).npu(), key_rope=rope, num_query_heads=heads,
        num_key_value_heads=1, input_layout=layout, softmax_scale=0.2, block_table=table.npu(), block_size=4,
        actual_seq_kvlen=list(lengths), return_softmax_lse=True,
    )  # fmt: skip
    whole = torch.cat([q, q_rope], -1)
    wanted, wanted_lse = expected(list(whole), compressed, [c[..., :32] for c in compressed], 0.2)
    check(
        (out.cpu(), lse.cpu()),
        (wanted.view(4, 1, heads, 32).permute(out_dims), wanted_lse.view(4, 1, heads, 1).transpose(1, 2)),
    )


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("sparse_mode", [0, 1])
def test_padded_with_a_mask(layout, sparse_mode):
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    q, k, v = (t.half() for t in (q, k, v))
    mask = torch.rand(2, 1, 3, 5) < 0.4
    mask[..., range(3), range(3)] = False  # all queries see something
    turn = {"BSH": lambda t: t.flatten(2), "BSND": lambda t: t}.get(layout, lambda t: t.transpose(1, 2).contiguous())
    out, lse = fused(
        turn(q), turn(k), turn(v), heads=4, kv_heads=2, layout=layout, scale=0.25, mask=mask, sparse_mode=sparse_mode,
        kv_lengths=[5, 4], pre_tokens=2, next_tokens=1,
    )  # fmt: skip
    for b, keys in enumerate((5, 4)):
        hidden = mask[b, 0, :, :keys]
        if sparse_mode == 0:  # the band starts in the upper left corner
            hidden = hidden | torch.tensor([[not -2 <= j - i <= 1 for j in range(keys)] for i in range(3)])
        wanted, wanted_lse = attention(q[b], k[b, :keys], v[b, :keys], 0.25, hidden)
        one = {"BSH": lambda t: t.unflatten(1, (4, 16)), "BNSD": lambda t: t.transpose(0, 1)}.get(layout, lambda t: t)
        torch.testing.assert_close(one(out[b]), wanted)
        torch.testing.assert_close(lse[b].squeeze(-1).t(), wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inner_precise", [0, 2])
def test_queries_that_a_mask_blinds(inner_precise):
    """Nothing is said of them (here: NaN), but with inner_precise 2 or 3: zeros."""
    q, k = torch.randn(1, 2, 2, 16).half(), torch.randn(1, 2, 3, 16).half()
    mask = torch.tensor([[True, True, True], [False, True, False]])
    out, lse = fused(
        q, k, k, heads=2, kv_heads=2, layout="BNSD", scale=0.3, mask=mask.view(1, 1, 2, 3), inner_precise=inner_precise
    )
    wanted, wanted_lse = attention(q[0].transpose(0, 1), k[0].transpose(0, 1), k[0].transpose(0, 1), 0.3, mask)
    if inner_precise == 0:
        wanted[0], wanted_lse[0] = math.nan, -math.inf
    torch.testing.assert_close(out[0].transpose(0, 1), wanted, equal_nan=True)
    torch.testing.assert_close(lse[0, ..., 0].t(), wanted_lse, rtol=1e-4, atol=1e-4)


def test_sink():
    q, k, v = (sequences((2, 3), heads, 16) for heads in (4, 2, 2))
    sink = torch.randn(4).bfloat16()
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        torch.cat(q).npu(), torch.cat(k).npu(), torch.cat(v).npu(), num_query_heads=4, num_key_value_heads=2,
        input_layout="TND", softmax_scale=0.3, actual_seq_qlen=ends(q), actual_seq_kvlen=ends(k), sparse_mode=3,
        atten_mask=TRIANGLE.npu(), learnable_sink=sink.npu(), return_softmax_lse=True,
    )  # fmt: skip
    check((out.cpu(), lse.cpu()), expected(q, k, v, 0.3, causal, sink))


def test_into_given_outputs():
    """As graphs are captured: the workspace is asked for first, and the outputs are there."""
    q, k, v = (sequences((2, 3), heads, 16) for heads in (4, 2, 2))
    tensors = [torch.cat(t).npu() for t in (q, k, v)]
    out, lse = torch.empty(5, 4, 16).bfloat16().npu(), torch.empty(5, 4, 1).npu()
    one = {"num_heads": 4, "scale": 0.3, "actual_seq_lengths": ends(q), "actual_seq_lengths_kv": ends(k)}
    two = {"num_query_heads": 4, "softmax_scale": 0.3, "actual_seq_qlen": ends(q), "actual_seq_kvlen": ends(k)}
    both = {"num_key_value_heads": 2, "input_layout": "TND", "sparse_mode": 3, "atten_mask": TRIANGLE.npu()}
    for operator, get_workspace, arguments in (
        (
            torch_npu.npu_fused_infer_attention_score,
            torch_npu._npu_fused_infer_attention_score_get_max_workspace,
            {**one, **both, "softmax_lse_flag": True},
        ),
        (
            torch_npu.npu_fused_infer_attention_score_v2,
            torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace,
            {**two, **both, "return_softmax_lse": True},
        ),
    ):
        workspace = get_workspace(*tensors, **arguments)
        operator.out(*tensors, **arguments, workspace=workspace, out=[out.fill_(7), lse.fill_(7)])
        check((out.cpu(), lse.cpu()), expected(q, k, v, 0.3, causal))


def test_lse_is_left_out():
    q = torch.randn(2, 2, 16).bfloat16().npu()
    arguments = {"num_heads": 2, "input_layout": "TND", "actual_seq_lengths": [2], "actual_seq_lengths_kv": [2]}
    assert torch_npu.npu_fused_infer_attention_score(q, q, q, **arguments)[1].shape == (0,)


REFUSALS = [
    ({"q_lengths": [2, 3]}, r"the last of actual_seq_lengths is 3, and query has T = 4"),
    ({"q_lengths": [3, 2, 4]}, r"falls"),
    ({"kv_lengths": [4]}, r"actual_seq_lengths_kv is of 1 sequences, and actual_seq_lengths of 2"),
    ({"kv_lengths": [2, 9]}, r"key has T = 4"),
    ({"mask": TRIANGLE.t().contiguous(), **CAUSAL}, r"ones above the diagonal"),
    ({"mask": TRIANGLE[:4, :4].contiguous(), **CAUSAL}, r"2048 x 2048"),
    ({"mask": None, **CAUSAL}, r"2048 x 2048"),
    ({"mask": TRIANGLE}, r"atten_mask with sparse_mode 0 or 1 and layout = TND"),
    ({"sparse_mode": 9}, r"sparse_mode = 9 is not emulated"),
    ({"antiquant_mode": 1}, r"antiquant_mode = 1 is not emulated"),
    ({"pse_shift": torch.zeros(1, 2, 4, 4).bfloat16().npu()}, r"pse_shift"),
    ({"kv_heads": 3}, r"cannot share 3"),
    ({"query_rope": torch.zeros(4, 2, 8).bfloat16().npu()}, r"go together"),
]


@pytest.mark.parametrize(("change", "text"), REFUSALS)
def test_refusals(change, text):
    q = torch.randn(4, 2, 16).bfloat16()
    arguments = {"heads": 2, "kv_heads": 2, "q_lengths": [2, 4], "kv_lengths": [2, 4], "mask": None, **change}
    with pytest.raises(RuntimeError, match=text):
        fused(q, q, q, **arguments)


@pytest.mark.parametrize(
    ("table", "block_size", "text"),
    [
        ([[0], [5]], 8, "block_table has values"),
        ([[0]], 8, "one row for each of 2"),
        ([[0], [1]], 4, "block_size is 4"),
    ],
)
def test_refusals_of_paged_calls(table, block_size, text):
    q, cache = torch.randn(4, 2, 16).bfloat16(), torch.randn(3, 8, 32).bfloat16()
    table = torch.tensor(table, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match=text):
        fused(
            q, cache, cache, heads=2, kv_heads=2, mask=None, q_lengths=[2, 4], kv_lengths=[2, 4], block_table=table,
            block_size=block_size,
        )  # fmt: skip
