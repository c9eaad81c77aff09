"""NpuExperts against the reference experts in fp64, each test on inputs of its own (the seed is in the failure).

Bounds are of ‖out - ref‖ / ‖ref‖: the dtype's own (testing/compare.py) for floating weights; 3 % for W8A8 against fp64
with the same rounded weights, where two roundings of rows to 8 bits leave about 1 %. On the soft NPU the operators'
arguments, shapes and meaning are tested, not CANN's numerics.
"""

from __future__ import annotations

import logging
import random
from dataclasses import fields, replace

import pytest
import torch

from vllm_ascend_moe.errors import DtypeError, InvalidValueError, ShapeError
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.npu import NpuExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts, local_slots
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.data import Routing

H, N, E, K = 40, 24, 6, 3
LOCAL = [0, 2, 5]
NAN = float("nan")
W8A8_BOUND = 0.03
FLOATING = [torch.bfloat16, torch.float16, torch.float32]
W8A8 = [torch.bfloat16, torch.float16]


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 16)  # by the test's name: tests/conftest.py
    logging.getLogger(__name__).warning("seed %d", value)  # shown where a test fails
    return value


def npu(weights: ExpertWeights) -> ExpertWeights:
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return replace(weights, **{name: x.npu() for name, x in tensors.items() if x is not None})


class Rows:
    """Rows with hard inputs: unrouted choices with NaN weights, rows without an expert here with NaN throughout."""

    def __init__(self, seed: int, dtype: torch.dtype, rows: int = 17, routing: Routing = Routing.UNIFORM) -> None:
        tokens = torch.arange(rows)
        self.map = data.expert_map(E, LOCAL)
        self.ids = data.topk_ids(seed, tokens, K, E, routing, invalid_share=0.3)
        weights = data.topk_weights(seed, tokens, K)
        self.routed = torch.isin(self.ids, torch.tensor(LOCAL, dtype=torch.int32))
        self.weights = weights.masked_fill(~self.routed, NAN)
        self.hidden = data.hidden_states(seed, tokens, H, dtype).masked_fill(~self.routed.any(1, keepdim=True), NAN)

    def on_npu(self, weights: ExpertWeights, **options) -> torch.Tensor:
        given = [x.npu() for x in (self.hidden, self.weights, self.ids)]
        return NpuExperts().apply(*given, npu(weights), expert_map=self.map.npu(), **options).cpu()

    def reference(self, weights: ExpertWeights, **options) -> torch.Tensor:
        hidden = self.hidden.double()
        return ReferenceExperts().apply(hidden, self.weights, self.ids, weights, expert_map=self.map, **options)

    def check(self, out: torch.Tensor, wanted: torch.Tensor, bound: float | None = None) -> None:
        assert out.dtype == self.hidden.dtype
        assert_close(out, wanted, bound=bound)
        nowhere = ~self.routed.any(1)
        assert_equal(out[nowhere], torch.zeros_like(out[nowhere]), what="rows without an expert here")


@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai", "swigluoai_uninterleave", "relu2_no_mul"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("on_input", [False, True])
def test_rows(activation, dtype, on_input, seed):
    rows = Rows(seed, dtype)
    gated = not activation.endswith("_no_mul")
    weights = data.expert_weights(seed, LOCAL, H, N, dtype, gated=gated, bias=on_input)
    options = {"activation": activation, "apply_router_weight_on_input": on_input}
    rows.check(rows.on_npu(weights, **options), rows.reference(weights, **options))


@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize("routing", Routing)
def test_counts_and_routings(count, routing, seed):
    rows = Rows(seed, torch.bfloat16, count, routing)
    weights = data.expert_weights(seed, LOCAL, H, N, torch.bfloat16)
    out = torch.full((count, H), NAN, dtype=torch.bfloat16, device="npu")
    rows.check(rows.on_npu(weights, out=out), rows.reference(weights))
    assert_equal(out.cpu(), rows.on_npu(weights), what="out is written")


@pytest.mark.parametrize("num_local", [0, 1, 3])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_local_ids_without_a_map(num_local, id_dtype, seed):
    tokens = torch.arange(9)
    hidden = data.hidden_states(seed, tokens, H, torch.bfloat16)
    ids = data.topk_ids(seed, tokens, 2, max(2, num_local), invalid_share=0.4, dtype=id_dtype)
    weights = data.expert_weights(seed, range(num_local), H, N, torch.bfloat16)
    given = (hidden, data.topk_weights(seed, tokens, 2), ids)
    out = NpuExperts().apply(*(x.npu() for x in given), npu(weights))
    assert_close(out, ReferenceExperts().apply(hidden.double(), *given[1:], weights))


def test_rows_of_a_packed_gather_are_strided(seed):
    rows = Rows(seed, torch.bfloat16)
    weights = data.expert_weights(seed, LOCAL, H, N, torch.bfloat16)
    wire = torch.full((17, H + 16), NAN, dtype=torch.bfloat16, device="npu")
    wire[:, :H] = rows.hidden.npu()
    ids = torch.full((17, K + 2), 0, dtype=torch.int32, device="npu")
    ids[:, :K] = rows.ids.npu()
    out = NpuExperts().apply(wire[:, :H], rows.weights.npu(), ids[:, :K], npu(weights), expert_map=rows.map.npu())
    rows.check(out.cpu(), rows.reference(weights))


@pytest.mark.parametrize("dtype", W8A8, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_w8a8_rows(dtype, bias, activation, seed):
    rows = Rows(seed, dtype)
    scaled = ScaledExpertWeights.quantize(data.expert_weights(seed, LOCAL, H, N, dtype, bias=bias))
    wanted = rows.reference(scaled.dequantize(), activation=activation)
    rows.check(rows.on_npu(scaled, activation=activation), wanted, W8A8_BOUND)


def int8_rows(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With scales; rows of NaN become zeros with a scale of NaN."""
    scales = hidden.float().abs().amax(-1) / 127
    return (hidden.float() / scales[..., None]).nan_to_num(0).round().to(torch.int8), scales


@pytest.mark.parametrize("dtype", W8A8, ids=str)
@pytest.mark.parametrize("scaled_weights", [False, True])
def test_int8_rows_with_the_scales_of_a_dispatch(dtype, scaled_weights, seed):
    rows = Rows(seed, dtype)
    weights = data.expert_weights(seed, LOCAL, H, N, dtype)
    values, scales = int8_rows(rows.hidden)
    meant = values.double() * scales[:, None].double()
    if scaled_weights:
        weights = ScaledExpertWeights.quantize(weights)
        wide = weights.dequantize()
    rows.hidden = values
    out = rows.on_npu(weights, scales=scales.npu(), out=torch.empty((17, H), dtype=dtype, device="npu"))
    rows.hidden = meant.to(dtype)
    wanted = ReferenceExperts().apply(
        meant, rows.weights, rows.ids, wide if scaled_weights else weights, expert_map=rows.map
    )
    rows.check(out, wanted, W8A8_BOUND if scaled_weights else None)


@pytest.mark.parametrize("counts", [[5, 0, 9], [0, 0, 0], [9, 9, 9], [0, 1, 0]], ids=str)
@pytest.mark.parametrize("form", ["bf16", "fp16", "fp32", "W8A8", "W8A8, int8 rows", "bf16, int8 rows"])
def test_batched(counts, form, seed):
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(form, torch.bfloat16)
    weights = data.expert_weights(seed, LOCAL, H, N, dtype, bias=True)
    hidden = data.hidden_states(seed, torch.arange(27), H, dtype).view(3, 9, H)
    unused = torch.arange(9) >= torch.tensor(counts)[:, None]
    hidden = hidden.masked_fill(unused[..., None], NAN)
    meant, scales, wide = hidden.double(), None, weights
    if "int8 rows" in form:
        hidden, scales = int8_rows(hidden)
        meant = hidden.double() * scales[..., None].double()
    if "W8A8" in form:
        weights = ScaledExpertWeights.quantize(weights)
        wide = weights.dequantize()
    out = torch.full((3, 9, H), 7.0, dtype=dtype, device="npu")
    experts = torch.tensor(counts, dtype=torch.int32)
    given = NpuExperts().apply_batched(
        hidden.npu(), experts.npu(), npu(weights), scales=None if scales is None else scales.npu(), out=out
    )
    assert given is out
    wanted = ReferenceExperts().apply_batched(meant, experts, wide)
    for expert, count in enumerate(counts):
        bound = W8A8_BOUND if "W8A8" in form else None
        assert_close(out[expert, :count], wanted[expert, :count], bound=bound)
        assert (out[expert, count:] == 7).all(), "a row past the count was written"


def test_batched_without_out_has_the_rows_dtype(seed):
    weights = data.expert_weights(seed, LOCAL, H, N, torch.bfloat16)
    hidden, counts = torch.zeros(3, 0, H, dtype=torch.bfloat16).npu(), torch.zeros(3, dtype=torch.int32).npu()
    out = NpuExperts().apply_batched(hidden, counts, npu(weights))
    assert (out.dtype, out.shape) == (torch.bfloat16, (3, 0, H))


def weights_of(dtype: torch.dtype) -> ExpertWeights:
    return data.expert_weights(1, LOCAL, H, N, dtype)


REFUSED = {
    "hidden is fp16, weights bf16": (Rows(1, torch.float16), weights_of(torch.bfloat16), {}, DtypeError),
    "fp32 rows, W8A8": (
        Rows(1, torch.float32),
        ScaledExpertWeights.quantize(weights_of(torch.float32)),
        {},
        DtypeError,
    ),
    "scales of floating rows": (
        Rows(1, torch.float32),
        weights_of(torch.float32),
        {"scales": torch.ones(17)},
        DtypeError,
    ),
    "fp8 weights": (
        Rows(1, torch.bfloat16),
        ScaledExpertWeights.quantize(weights_of(torch.bfloat16), torch.float8_e4m3fn),
        {},
        DtypeError,
    ),
    "another hidden size": (
        Rows(1, torch.float32),
        data.expert_weights(1, LOCAL, H + 1, N),
        {},
        ShapeError,
    ),
    "N rows for a gated activation": (
        Rows(1, torch.float32),
        data.expert_weights(1, LOCAL, H, N, gated=False),
        {},
        ShapeError,
    ),
    "an unknown activation": (
        Rows(1, torch.float32),
        weights_of(torch.float32),
        {"activation": "x"},
        InvalidValueError,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    rows, weights, options, error = REFUSED[name]
    with pytest.raises(error, match=r"must be"):
        rows.on_npu(weights, **options)


@pytest.mark.parametrize("counts", [torch.ones(1).int(), torch.ones(4).int(), torch.ones(3)], ids=["1", "4", "float"])
def test_batched_counts_of_other_experts_are_refused(counts):
    """One number would hold for all experts, by torch's rules."""
    weights = npu(weights_of(torch.bfloat16))
    with pytest.raises(ShapeError, match=r"expert_num_tokens"):
        NpuExperts().apply_batched(torch.zeros(3, 9, H).bfloat16().npu(), counts.npu(), weights)


def test_scales_of_other_rows_are_refused():
    weights, rows = npu(weights_of(torch.bfloat16)), Rows(1, torch.bfloat16)
    given = [x.npu() for x in (rows.hidden.nan_to_num().to(torch.int8), rows.weights, rows.ids)]
    with pytest.raises(ShapeError, match=r"scales.shape"):
        NpuExperts().apply(*given, weights, expert_map=rows.map.npu(), scales=torch.ones(1).npu())
    batch = torch.zeros(3, 9, H, dtype=torch.int8).npu()
    with pytest.raises(ShapeError, match=r"scales.shape"):
        NpuExperts().apply_batched(batch, torch.ones(3).int().npu(), weights, scales=torch.ones(9, 3).npu())


def test_ids_of_other_rows_are_refused():
    rows = Rows(1, torch.float32)
    rows.ids = rows.ids[1:]
    with pytest.raises(ShapeError, match=r"topk_ids.shape = \(16, 3\)"):
        rows.on_npu(weights_of(torch.float32))


@pytest.mark.parametrize("form", ["rows with local ids", "batched"])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_captured_layer_replays_on_new_data(form, quantized, seed):
    """Other tokens, ids and counts at the same addresses: nothing of the first was baked in, nothing was read back."""
    weights = data.expert_weights(seed, LOCAL, H, N, torch.bfloat16)
    used, wide = weights, weights
    if quantized:
        used = ScaledExpertWeights.quantize(weights)
        wide = used.dequantize()
    on_npu, steps = npu(used), [Rows(seed + step, torch.bfloat16) for step in range(3)]
    counts = [torch.tensor(c, dtype=torch.int32) for c in ([5, 0, 3], [0, 5, 1], [5, 5, 5])]
    given = [x.npu() for x in (steps[0].hidden, steps[0].weights, steps[0].ids)]
    batch, count = given[0][:15].view(3, 5, H), counts[0].npu()

    def layer() -> torch.Tensor:
        if form != "batched":
            return NpuExperts().apply(*given, on_npu)
        return NpuExperts().apply_batched(batch, count, on_npu)

    layer()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = layer()
    for rows, filled in zip(steps, counts, strict=True):
        ids = local_slots(rows.ids, rows.map, len(LOCAL))
        for to, x in zip([*given, count], [rows.hidden, rows.weights, ids, filled], strict=True):
            to.copy_(x)
        graph.replay()
        if form != "batched":
            rows.check(out.cpu(), rows.reference(wide), W8A8_BOUND if quantized else None)
            continue
        x = rows.hidden[:15].view(3, 5, H)
        wanted = ReferenceExperts().apply_batched(x.double(), filled, wide)
        for expert, n in enumerate(filled.tolist()):
            mine = x[expert, :n].isfinite().all(1)  # a row of NaN is NaN, and its own affair
            bound = W8A8_BOUND if quantized else None
            assert_close(out[expert, :n].cpu()[mine], wanted[expert, :n][mine], bound=bound)
