"""A whole MoE layer out of the operators, as NPU code writes it: eager, and captured and replayed with other data."""

import pytest
import torch
import torch_npu

T, H, N, E, K = 13, 16, 12, 8, 3


def layer(x, logits, w13, w2, scales, start, end):
    """Experts [start, end) of the layer; scales: None, or those of int8 weights."""
    quantised = scales is not None
    weights, ids, _ = torch_npu.npu_moe_gating_top_k(logits, K, renorm=1, norm_type=0)
    rows, row_idx, counts, row_scales = torch_npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=T * K,
        expert_num=E,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1 if quantised else -1,
        active_expert_range=[start, end],
    )

    def multiply(rows, weight, scale, row_scales):
        extra = {"scale": [scale], "per_token_scale": [row_scales], "output_dtype": torch.bfloat16} if quantised else {}
        return torch_npu.npu_grouped_matmul(
            [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1, **extra
        )[0]

    hidden = torch_npu.npu_swiglu(multiply(rows, w13, scales and scales[0], row_scales))
    hidden, hidden_scales = torch_npu.npu_dynamic_quant(hidden) if quantised else (hidden, None)
    rows = multiply(hidden, w2, scales and scales[1], hidden_scales)
    mine = (ids >= start) & (ids < end)
    return torch_npu.npu_moe_token_unpermute(rows, row_idx.clamp(min=0), probs=weights * mine)


def reference(x, logits, w13, w2, start, end):
    """Token after token, in float64."""
    out = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        weights, ids = logits[t].double().softmax(0).topk(K)
        for weight, e in zip(weights / weights.sum(), ids.tolist(), strict=True):
            if start <= e < end:
                a, b = (x[t].double() @ w13[e].double()).chunk(2)
                out[t] += weight * ((torch.nn.functional.silu(a) * b) @ w2[e].double())
    return out


def data(seed: int):
    torch.manual_seed(seed)
    return torch.randn(T, H).bfloat16(), torch.randn(T, E)


def weights_of(quantised: bool, start: int, end: int):
    """What the reference multiplies with, and what the NPU gets: bfloat16, or int8 with scales."""
    w13, w2 = torch.randn(E, H, 2 * N) / 4, torch.randn(E, N, H) / 4
    if not quantised:
        w13, w2 = w13.bfloat16(), w2.bfloat16()
        return (w13, w2), (w13[start:end].npu(), w2[start:end].npu(), None)
    given, real = [], []
    for w in (w13, w2):
        scale = (w.abs().amax(1) / 127).bfloat16()
        q = torch.round(w / scale.float()[:, None]).clamp(-127, 127).to(torch.int8)
        real.append(q.float() * scale.float()[:, None])
        given.append((q[start:end].npu(), scale[start:end].npu()))
    return tuple(real), (given[0][0], given[1][0], [given[0][1], given[1][1]])


@pytest.mark.parametrize("bounds", [(0, E), (2, 5), (7, 8)])
@pytest.mark.parametrize("quantised", [False, True])
def test_layer(quantised, bounds):
    torch.manual_seed(7)
    real, given = weights_of(quantised, *bounds)
    x, logits = (t.npu() for t in data(0))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        replayed = layer(x, logits, *given, *bounds)
    for seed in (1, 2):
        fresh_x, fresh_logits = data(seed)
        x.copy_(fresh_x)
        logits.copy_(fresh_logits)
        graph.replay()
        eager = layer(x, logits, *given, *bounds)
        assert torch.equal(eager.cpu(), replayed.cpu())
        wanted = reference(fresh_x, fresh_logits, *real, *bounds)
        limit = 0.05 if quantised else 0.02
        torch.testing.assert_close(eager.cpu().double(), wanted, rtol=limit, atol=limit * wanted.abs().max().item())
