"""init_routing, versions 1 and 2 (its host code calls aclnn version 3), against a loop over assignments."""

import pytest
import torch
import torch_npu
from aclnn import aclnn

INT_MARK = -1431655766  # 0xAAAAAAAA: an int32 that the operator did not write


def ids_of(kind: str, tokens: int, k: int, experts: int) -> torch.Tensor:
    if kind == "one expert":
        return torch.full((tokens, k), experts - 1, dtype=torch.int32)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]) if tokens else torch.empty(0, k)
    ids = ids.to(torch.int32)
    if kind == "unrouted":
        ids[torch.rand(tokens, k) < 0.3] = -1
    return ids


def by_expert(ids: torch.Tensor, start: int, end: int) -> list[list[int]]:
    """For each expert of the range, the positions in the flattened ids that name it, in order."""
    flat = ids.flatten().tolist()
    return [[p for p, e in enumerate(flat) if e == expert] for expert in range(start, end)]


def quantized(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = row.abs().max() / 127
    return torch.round(row / scale).to(torch.int8), scale


CASES = [("random", 7, 3, 8), ("random", 33, 4, 5), ("one expert", 6, 2, 4), ("unrouted", 9, 2, 6), ("random", 0, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scatter", [0, 1])
def test_rows_of_an_expert_range(case, dtype, scatter):
    kind, tokens, k, experts = case
    start, end = 1, experts - 1 if kind != "one expert" else experts
    ids, x = ids_of(kind, tokens, k, experts), (torch.randn(tokens, 13) * 50).to(dtype)
    scale = torch.rand(tokens) if dtype == torch.int8 else None
    out, row_idx, counts, out_scale = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        ids.npu(),
        scale=None if scale is None else scale.npu(),
        active_num=tokens * k,
        expert_num=experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[start, end],
        row_idx_type=scatter,
    )
    groups = by_expert(ids, start, end)
    order = [p for group in groups for p in group]
    n = len(order)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [len(g) for g in groups]
    assert out.shape == (tokens * k, 13)
    assert out.dtype == dtype
    assert row_idx.dtype == torch.int32
    assert torch.equal(out[:n].cpu(), x[[p // k for p in order]])
    if dtype != torch.int8:
        assert out[n:].isnan().all()
    else:
        assert torch.equal(out_scale[:n].cpu(), scale[[p // k for p in order]])
        assert out_scale[n:].isnan().all()
    if scatter:
        assert row_idx.tolist() == order + [INT_MARK] * (tokens * k - n)
    else:
        assert row_idx.tolist() == [order.index(p) if p in order else -1 for p in range(tokens * k)]


@pytest.mark.parametrize("tokens_type", [0, 1, 2])
@pytest.mark.parametrize("bounds", [[0, 6], [2, 5]])
def test_token_counts(tokens_type, bounds):
    ids = torch.tensor([[0, 2], [2, 5], [3, 2]], dtype=torch.int32)
    start, end = bounds
    counts = torch_npu.npu_moe_init_routing_v2(
        torch.randn(3, 4).npu(),
        ids.npu(),
        active_num=6,
        expert_num=6,
        expert_tokens_num_type=tokens_type,
        expert_tokens_num_flag=True,
        active_expert_range=bounds,
    )[2]
    single = [(ids == e).sum().item() for e in range(start, end)]
    if tokens_type == 1:
        assert counts.tolist() == single
    elif tokens_type == 0:
        assert counts.tolist() == torch.tensor(single).cumsum(0).tolist()
    else:
        pairs = [[e, n] for e, n in zip(range(start, end), single, strict=True) if n]
        assert counts.shape == (6, 2)
        assert counts.tolist()[: len(pairs) + 1] == [*pairs, [0, 0]][:6]


@pytest.mark.parametrize("smooth", [None, "each", "one"])
def test_dynamic_quantisation(smooth):
    tokens, k, experts = 11, 2, 4
    ids, x = ids_of("random", tokens, k, experts), torch.randn(tokens, 24, dtype=torch.bfloat16)
    scale = None if smooth is None else torch.rand(3 if smooth == "each" else 1, 24) + 0.5
    out, _, _, scales = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        ids.npu(),
        scale=None if scale is None else scale.npu(),
        active_num=0,
        expert_num=experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1,
        active_expert_range=[1, 4],
    )
    i = 0
    for expert, group in enumerate(by_expert(ids, 1, 4)):
        for p in group:
            row = x[p // k].float()
            if scale is not None:
                row = row * scale[expert if smooth == "each" else 0]
            values, s = quantized(row)
            assert torch.equal(out[i].cpu(), values)
            assert torch.equal(scales[i].cpu(), s)
            i += 1
    assert out.dtype == torch.int8
    assert scales[i:].isnan().all()


def test_a_zero_row_quantises_to_zeros():
    out, _, _, scales = torch_npu.npu_moe_init_routing_v2(
        torch.zeros(1, 8).npu(),
        torch.zeros(1, 1, dtype=torch.int32).npu(),
        active_num=1,
        expert_num=2,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1,
        active_expert_range=[0, 2],
    )
    assert out.tolist() == [[0] * 8]
    assert scales.tolist() == [0]


def test_static_quantisation():
    x, ids = torch.randn(5, 16), torch.zeros(5, 1, dtype=torch.int32)
    scale, offset = torch.tensor([40.0]), torch.tensor([3.0])
    out = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        ids.npu(),
        scale=scale.npu(),
        offset=offset.npu(),
        active_num=5,
        expert_num=1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=0,
        active_expert_range=[0, 1],
    )[0]
    assert torch.equal(out.cpu(), torch.round(x * 40 + 3).clamp(-128, 127).to(torch.int8))


def test_active_num_keeps_the_first_rows():
    ids, x = ids_of("random", 6, 2, 4), torch.randn(6, 4)
    out, row_idx, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        ids.npu(),
        active_num=5,
        expert_num=4,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 4],
    )
    order = [p for group in by_expert(ids, 0, 4) for p in group]
    assert torch.equal(out.cpu(), x[[p // 2 for p in order[:5]]])
    assert row_idx.tolist() == [order.index(p) for p in range(12)]
    assert counts.sum() == 12


@pytest.mark.parametrize("quantize", [False, True])
def test_drop_and_pad(quantize):
    tokens, k, experts, capacity = 9, 2, 4, 3
    ids, x = ids_of("random", tokens, k, experts), torch.randn(tokens, 8)
    out, row_idx, counts, scales = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        ids.npu(),
        active_num=tokens * k,
        expert_capacity=capacity,
        expert_num=experts,
        drop_pad_mode=1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1 if quantize else -1,
        active_expert_range=[0, experts],
    )
    groups = by_expert(ids, 0, experts)
    assert out.shape == (experts, capacity, 8)
    assert counts.tolist() == [len(g) for g in groups]
    wanted_idx = [-1] * (tokens * k)
    for e, group in enumerate(groups):
        for c in range(capacity):
            row = x[group[c] // k] if c < len(group) else torch.zeros(8)
            if c < len(group):
                wanted_idx[group[c]] = e * capacity + c
            if not quantize:
                assert torch.equal(out[e, c].cpu(), row)
            elif c < len(group):
                values, scale = quantized(row)
                assert torch.equal(out[e, c].cpu(), values)
                assert scales[e * capacity + c].cpu() == scale
            else:
                assert not out[e, c].any()
                assert scales[e * capacity + c] == 0
    assert row_idx.tolist() == wanted_idx


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "k", "active"), [(5, 3, 5), (6, 2, 4), (1, 1, 9)])
def test_version_1(tokens, k, active, dtype):
    ids, x = ids_of("random", tokens, k, 8), torch.randn(tokens, 7).to(dtype)
    row_idx = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().contiguous()
    out, expanded_row_idx, expanded_experts = torch_npu.npu_moe_init_routing(x.npu(), row_idx.npu(), ids.npu(), active)
    order = sorted(range(tokens * k), key=lambda p: ids.flatten()[p].item())
    rows = [row_idx.flatten()[p].item() for p in order]
    assert expanded_experts.tolist() == [ids.flatten()[p].item() for p in order]
    assert expanded_row_idx.tolist() == [rows.index(r) for r in range(tokens * k)]
    assert torch.equal(out.cpu(), x[[r % tokens for r in rows[: min(tokens, active) * k]]])


@pytest.mark.parametrize("flag", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "active"), [(5, 0), (5, 7), (0, 0)])
def test_version_2(tokens, active, flag):
    k, experts = 2, 4
    ids, x = ids_of("random", tokens, k, experts), torch.randn(tokens, 6).bfloat16()
    rows = min(active or tokens * k, tokens * k)
    out, row_idx = torch.empty(rows, 6).bfloat16().npu(), torch.empty(tokens * k, dtype=torch.int32).npu()
    counts, before = torch.zeros(experts, dtype=torch.int32).npu(), torch.zeros(experts, dtype=torch.int32).npu()
    aclnn("aclnnMoeInitRoutingV2", x.npu(), ids.npu(), active, 0, experts, 0, flag, False, out, row_idx, counts, before)
    groups = by_expert(ids, 0, experts)
    order = [p for group in groups for p in group]
    assert torch.equal(out.cpu(), x[[p // k for p in order[:rows]]])
    assert row_idx.tolist() == [order.index(p) for p in range(tokens * k)]
    single = torch.tensor([len(g) for g in groups])
    wanted = [torch.full((experts,), INT_MARK), single.cumsum(0), single][flag]
    assert counts.tolist() == wanted.tolist()


def test_version_2_drops_and_pads():
    ids = torch.tensor([[0, 2], [0, 2], [2, 0], [0, 1]], dtype=torch.int32)
    x = torch.arange(1.0, 5.0)[:, None].expand(4, 3).contiguous()
    out, row_idx = torch.empty(3, 2, 3).npu(), torch.empty(8, dtype=torch.int32).npu()
    before = torch.empty(3, dtype=torch.int32).npu()
    aclnn("aclnnMoeInitRoutingV2", x.npu(), ids.npu(), 0, 2, 3, 1, 0, True, out, row_idx, None, before)
    assert out[:, :, 0].tolist() == [[1, 2], [4, 0], [1, 2]]
    assert row_idx.tolist() == [0, 4, 1, 5, -1, -1, -1, 2]
    assert before.tolist() == [4, 1, 3]


def call(**changed):
    arguments = {
        "active_num": 6,
        "expert_num": 4,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 4],
        **changed,
    }
    x = arguments.pop("x", torch.randn(3, 4))
    ids = arguments.pop("ids", torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32))
    return torch_npu.npu_moe_init_routing_v2(x.npu(), ids.npu(), **arguments)


REFUSED = {
    "quant_mode = 12 is not emulated": {"quant_mode": 12},
    r"active_expert_range = \[2, 5\] of 4": {"active_expert_range": [2, 5]},
    "expert_idx has values from -2": {"ids": torch.tensor([[0, -2], [2, 3], [1, 2]], dtype=torch.int32)},
    "expert_idx has values from 0 to 9": {"ids": torch.tensor([[0, 9], [2, 3], [1, 2]], dtype=torch.int32)},
    "int8 x with quant_mode = 1": {"quant_mode": 1, "x": torch.zeros(3, 4, dtype=torch.int8)},
    "expert_capacity = 4 of 3": {"drop_pad_mode": 1, "expert_capacity": 4},
    "row_idx_type = 1 with drop_pad_mode = 1": {"drop_pad_mode": 1, "expert_capacity": 2, "row_idx_type": 1},
    "do not fit": {"ids": torch.zeros(2, 2, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_argument(message):
    with pytest.raises(RuntimeError, match=f"aclnnMoeInitRoutingV3.*{message}"):
        call(**REFUSED[message])
