"""Reference experts and activations against Python loops over single numbers.

Proves the values every fast kernel is compared with: maps, invalid ids, NaN in what is not routed, biases,
activations, dtypes, both formats. Says nothing about speed, except that unrouted rows reach no matrix product.
"""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.experts import reference
from vllm_ascend_moe.experts.activation import ACTIVATIONS, activate, check_activation, is_gated
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NativeExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts, local_slots
from vllm_ascend_moe.experts.torch_form import TorchExperts
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal

H, N = 6, 4


# -- activations -----------------------------------------------------------------------------------------------


def one_value(name, gate, up=1.0):
    """The activation of one number, by the formula in its paper or model."""
    base = name.removesuffix("_no_mul")
    if base.startswith("swigluoai"):  # gpt-oss
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)
    value = {
        "silu": lambda: gate / (1 + math.exp(-gate)),
        "gelu": lambda: gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
        "relu2": lambda: max(gate, 0.0) ** 2,
    }[base]()
    return value if name.endswith("_no_mul") else value * up


VALUES = [(0.0, 1.0), (1.5, -2.0), (-3.0, 0.5), (9.0, 9.0), (-0.1, -8.0), (7.5, -7.5)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_by_its_formula(name):
    gate, up = (torch.tensor(column, dtype=torch.float64) for column in zip(*VALUES, strict=True))
    if not is_gated(name):
        x, expected = gate, [one_value(name, g) for g, _ in VALUES]
    elif name == "swigluoai":
        x, expected = torch.stack([gate, up], 1).flatten(), [one_value(name, g, u) for g, u in VALUES]
    else:
        x, expected = torch.cat([gate, up]), [one_value(name, g, u) for g, u in VALUES]
    assert_close(activate(x, name), torch.tensor(expected, dtype=torch.float64), what=name)
    stacked = activate(x.expand(3, 2, -1).float(), name)
    assert stacked.dtype == torch.float32
    assert stacked.shape == (3, 2, len(VALUES))


def test_activation_names_are_vllms():
    from vllm.model_executor.layers.fused_moe import MoEActivation

    for name in ACTIVATIONS:
        assert MoEActivation(name).is_gated == is_gated(name)


@pytest.mark.parametrize("name", ["swish", "", "silu_no_mul_no_mul", "SILU"])
def test_an_unknown_activation_is_named_with_the_known_ones(name):
    with pytest.raises(InvalidValueError, match="silu, gelu"):
        check_activation(name)
    with pytest.raises(InvalidValueError, match="activation"):
        activate(torch.zeros(2, 2), name)


# -- ids and maps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("with_map", [True, False], ids=["map", "no map"])
def test_local_slots(dtype, with_map):
    """V #46408, #48371: -1 must not wrap round to the last expert, which is local here."""
    ids = torch.tensor([[0, 1, 2, 3], [-1, 4, -7, 1000]], dtype=dtype)
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32) if with_map else None
    expected = [[-1, 1, -1, 0], [-1] * 4] if with_map else [[0, 1, -1, -1], [-1] * 4]
    assert_equal(local_slots(ids, expert_map, 2), torch.tensor(expected))


def test_local_slots_of_nothing():
    assert local_slots(torch.zeros(0, 2, dtype=torch.int32), None, 4).shape == (0, 2)
    assert local_slots(torch.zeros(2, 2, dtype=torch.int32), None, 0).eq(-1).all()
    assert local_slots(torch.zeros(2, 2, dtype=torch.int32), torch.empty(0, dtype=torch.int32), 0).eq(-1).all()


def test_a_map_entry_beyond_the_local_weights_is_not_routed():
    expert_map = torch.tensor([0, 5], dtype=torch.int32)
    assert local_slots(torch.tensor([[0, 1]]), expert_map, 2).tolist() == [[0, -1]]


# -- rows format -----------------------------------------------------------------------------------------------


def by_hand(hidden, topk_weights, ids, weights, slots_of, activation, on_input):
    """Row by row and choice by choice, in Python floats."""
    out = torch.zeros(hidden.shape[0], hidden.shape[1], dtype=torch.float64)
    for row in range(hidden.shape[0]):
        for choice in range(ids.shape[1]):
            slot = slots_of.get(int(ids[row, choice]))
            if slot is None:
                continue
            w13, w2 = weights.w13[slot].double().tolist(), weights.w2[slot].double().tolist()
            x = hidden[row].double().tolist()
            h = [sum(a * b for a, b in zip(line, x, strict=True)) for line in w13]
            if weights.w13_bias is not None:
                h = [a + b for a, b in zip(h, weights.w13_bias[slot].double().tolist(), strict=True)]
            if not is_gated(activation):
                pairs = [(g, 1.0) for g in h]
            elif activation == "swigluoai":
                pairs = list(zip(h[::2], h[1::2], strict=True))
            else:
                pairs = list(zip(h[: len(h) // 2], h[len(h) // 2 :], strict=True))
            a = [one_value(activation, gate, up) for gate, up in pairs]
            y = [sum(p * q for p, q in zip(line, a, strict=True)) for line in w2]
            if weights.w2_bias is not None:
                y = [p + q for p, q in zip(y, weights.w2_bias[slot].double().tolist(), strict=True)]
            scale = 1.0 if on_input else float(topk_weights[row, choice])
            out[row] += scale * torch.tensor(y, dtype=torch.float64)
    return out


def case(rows=5, top_k=3, experts=4, dtype=torch.float32, **of_weights):
    tokens = torch.arange(rows)
    return (
        data.hidden_states(3, tokens, H, dtype),
        data.topk_weights(3, tokens, top_k),
        data.topk_ids(3, tokens, top_k, experts, invalid_share=0.3),
        data.expert_weights(3, range(experts), H, N, dtype, **of_weights),
    )


@pytest.mark.parametrize("on_input", [False, True], ids=["weights after", "weights on input"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_by_hand(activation, bias, on_input):
    hidden, topk_weights, ids, weights = case(gated=is_gated(activation), bias=bias)
    out = ReferenceExperts().apply(
        hidden, topk_weights, ids, weights, activation=activation, apply_router_weight_on_input=on_input
    )
    slots = {slot: slot for slot in range(4)}
    assert_close(out, by_hand(hidden, topk_weights, ids, weights, slots, activation, on_input))
    assert out.dtype == hidden.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rows_in_other_dtypes_are_computed_wide(dtype):
    hidden, topk_weights, ids, weights = case(dtype=dtype)
    out = ReferenceExperts().apply(hidden, topk_weights, ids, weights)
    wide = by_hand(hidden, topk_weights, ids, weights, {s: s for s in range(4)}, "silu", False)
    assert out.dtype == dtype
    # One rounding, at the end: far inside what a computation in bf16 or fp16 would give.
    assert_close(out, wide, bound={torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float64: 1e-12}[dtype])


@given(
    local=st.lists(st.integers(0, 6), unique=True, max_size=4),
    rows=st.integers(0, 5),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_rows_with_a_map_count_only_the_experts_that_live_here(local, rows, id_dtype):
    tokens = torch.arange(rows)
    hidden, topk_weights = data.hidden_states(3, tokens, H, torch.float32), data.topk_weights(3, tokens, 2)
    ids = data.topk_ids(3, tokens, 2, 7, invalid_share=0.3, dtype=id_dtype)
    weights = data.expert_weights(3, local, H, N)
    out = ReferenceExperts().apply(hidden, topk_weights, ids, weights, expert_map=data.expert_map(7, local))
    slots = {expert: slot for slot, expert in enumerate(local)}
    assert_close(out, by_hand(hidden, topk_weights, ids, weights, slots, "silu", False))


def test_an_expert_chosen_twice_by_one_row_counts_twice():
    hidden, _, _, weights = case(rows=1)
    ids, topk_weights = torch.tensor([[2, 2, -1]]), torch.tensor([[0.25, 0.5, 0.25]])
    once = ReferenceExperts().apply(hidden, torch.tensor([[0.75]]), torch.tensor([[2]]), weights)
    assert_close(ReferenceExperts().apply(hidden, topk_weights, ids, weights), once)


@pytest.mark.parametrize("kernel", [ReferenceExperts, TorchExperts, NativeExperts])
@pytest.mark.parametrize(("ids", "weights"), [((2, 2), (3, 2)), ((2, 2), (2, 2)), ((3, 2), (3, 1))], ids=str)
def test_ids_and_weights_of_other_rows_are_refused_by_every_kernel(kernel, ids, weights):
    experts = data.expert_weights(0, range(2), H, N)
    with pytest.raises(ShapeError, match=r"topk_ids.shape = .*one row of ids and weights"):
        kernel().apply(torch.zeros(3, H), torch.ones(weights), torch.zeros(ids, dtype=torch.int32), experts)


def test_nan_in_what_is_not_routed_adds_exactly_zero():
    hidden, topk_weights, ids, weights = case()
    ids[1], ids[3, 0] = -1, 99
    clean = ReferenceExperts().apply(hidden, topk_weights, ids, weights)
    invalid = (ids < 0) | (ids >= 4)
    hidden = hidden.masked_fill(invalid.all(1, keepdim=True), float("nan"))
    out = ReferenceExperts().apply(hidden, topk_weights.masked_fill(invalid, float("nan")), ids, weights)
    assert_equal(out, clean)
    assert_equal(out[1], torch.zeros(H))


def test_out_is_written_in_every_row_also_when_strided():
    hidden, topk_weights, ids, weights = case()
    ids[2] = -1
    expected = ReferenceExperts().apply(hidden, topk_weights, ids, weights)
    buffer = torch.full((5, 2 * H), float("nan"))
    out = ReferenceExperts().apply(hidden, topk_weights, ids, weights, out=buffer[:, :H])
    assert out.data_ptr() == buffer.data_ptr()
    assert_equal(buffer[:, :H], expected)
    assert buffer[:, H:].isnan().all()
    assert_equal(out[2], torch.zeros(H))


def test_only_routed_rows_are_computed(monkeypatch):
    """Pad rows, invalid ids and other ranks' experts cost no matrix product."""
    rows_seen = []

    def counted(x, weights, expert, activation):
        rows_seen.append(x.shape[0])
        return expert_mlp(x, weights, expert, activation)

    expert_mlp = reference.expert_mlp
    monkeypatch.setattr(reference, "expert_mlp", counted)
    hidden, topk_weights, _, _ = case(rows=4, top_k=2)
    ids = torch.tensor([[0, 1], [-1, -1], [3, 9], [1, -1]])
    weights = data.expert_weights(3, [1, 3], H, N)
    ReferenceExperts().apply(hidden, topk_weights, ids, weights, expert_map=data.expert_map(4, [1, 3]))
    assert rows_seen == [2, 1]


# -- batched format --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_batched_is_each_experts_rows_and_leaves_the_rest(activation, dtype):
    counts = [2, 0, 3]
    hidden = data.hidden_states(5, torch.arange(9), H, dtype).view(3, 3, H).clone()
    weights = data.expert_weights(5, range(3), H, N, dtype, gated=is_gated(activation), bias=True)
    for expert, count in enumerate(counts):
        hidden[expert, count:] = float("nan")  # never read
    out = torch.full((3, 3, H), 7.0, dtype=dtype)
    ReferenceExperts().apply_batched(hidden, torch.tensor(counts), weights, activation=activation, out=out)
    for expert, count in enumerate(counts):
        ids = torch.full((count, 1), expert)
        expected = by_hand(
            hidden[expert, :count], torch.ones(count, 1), ids, weights, {expert: expert}, activation, False
        )
        assert_close(out[expert, :count], expected, what=f"expert {expert}")
        assert_equal(out[expert, count:], torch.full((3 - count, H), 7.0, dtype=dtype))


def test_batched_without_out_marks_unwritten_rows_with_nan():
    """So that a combine that reads one is found out."""
    hidden = data.hidden_states(5, torch.arange(4), H, torch.float32).view(2, 2, H)
    out = ReferenceExperts().apply_batched(hidden, torch.tensor([1, 2]), data.expert_weights(5, range(2), H, N))
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


def test_batched_scales_multiply_their_own_rows():
    """VA #3420, #13414: not expert 0's scale for all. int8 rows give the output in the weights' dtype."""
    quantised = torch.arange(-12, 12, dtype=torch.int8).view(2, 2, H)
    scales = torch.tensor([[0.5, 0.125], [0.25, 2.0]])
    weights = data.expert_weights(5, range(2), H, N, torch.bfloat16)
    counts = torch.tensor([2, 2])
    out = ReferenceExperts().apply_batched(quantised, counts, weights, scales=scales)
    plain = ReferenceExperts().apply_batched(quantised.float() * scales[..., None], counts, weights)
    assert out.dtype == torch.bfloat16
    assert_close(out, plain)


BATCH = {"hidden": torch.zeros(2, 3, H), "expert_num_tokens": torch.tensor([1, 3])}
CONTRADICTIONS = {
    "hidden.shape": {"hidden": torch.zeros(3, 3, H)},
    "expert_num_tokens": {"expert_num_tokens": torch.tensor([1])},  # the second expert's rows would be left out
    "expert_num_tokens[1]": {"expert_num_tokens": torch.tensor([1, 4])},
    "expert_num_tokens[0]": {"expert_num_tokens": torch.tensor([-1, 3])},
    "scales.shape": {"hidden": torch.zeros(2, 3, H, dtype=torch.int8), "scales": torch.ones(2, 2)},
}


@pytest.mark.parametrize("field", CONTRADICTIONS)
@pytest.mark.parametrize(
    "experts", [ReferenceExperts(), TorchExperts(), NativeExperts()], ids=lambda e: type(e).__name__
)
def test_batched_operands_that_contradict_each_other_are_refused(field, experts):
    weights = data.expert_weights(5, range(2), H, N)
    native_value = isinstance(experts, NativeExperts) and field.endswith("]")  # found in C++
    with pytest.raises(ValueError if native_value else InvalidValueError, match=re.escape(field)):
        experts.apply_batched(**{**BATCH, **CONTRADICTIONS[field]}, weights=weights)


def test_weights_are_keyword_only_and_frozen():
    w = torch.zeros(1, 2, 2)
    with pytest.raises(TypeError):
        ExpertWeights(w, w)
    with pytest.raises(AttributeError):
        ExpertWeights(w13=w, w2=w).w13 = None
