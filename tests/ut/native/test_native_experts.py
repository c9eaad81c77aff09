"""Native CPU experts against the reference, for every instruction set this processor has."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_cases import KIND_IDS, KINDS, REFERENCE, copy_of, make_weights, wide
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_moe.errors import InvalidValueError, ShapeError
from vllm_ascend_moe.experts.activation import ACTIVATIONS
from vllm_ascend_moe.experts.native import (
    NativeExperts,
    PackedExpertWeights,
    available_isas,
    pack_weights,
)
from vllm_ascend_moe.experts.torch_form import TorchExperts
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.testing.compare import BOUNDS, assert_close, relative_error

pytestmark = pytest.mark.skipif(not native_available(), reason="the native extension is not built")
CPU_INFO = Path("/proc/cpuinfo")


def moved_by_rounding(hidden, topk_weights, ids, weights, want, **options) -> float:
    """Relative change of the reference where the terms of the second product move by 2**-8, up or down: at most that
    is what rounding inner values to bf16 does to them. Much where the terms nearly cancel, as in outputs of one value.
    """
    changes = []
    for _ in range(4):
        signs = torch.randint(0, 2, weights.w2.shape) * 2.0 - 1
        moved = dataclasses.replace(weights, w2=weights.w2 * (1 + signs / 256))
        changes.append(relative_error(REFERENCE.apply(hidden, topk_weights, ids, moved, **options), want))
    return max(changes)


def check(hidden, topk_weights, ids, weights, isa, **options) -> torch.Tensor:
    """Native result, within its dtype's bound of the fp32 reference, or within what rounding inner values may do."""
    got = NativeExperts(isa).apply(hidden, topk_weights, ids, weights, **options)
    hidden, weights = hidden.float(), wide(weights)
    want = REFERENCE.apply(hidden, topk_weights, ids, weights, **options)
    bound = BOUNDS[got.dtype]
    if isa.endswith("_bf16") and relative_error(got, want) > bound:
        bound = max(bound, 2 * moved_by_rounding(hidden, topk_weights, ids, weights, want, **options))
    assert_close(got, want, bound=bound)
    return got


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=KIND_IDS)
def test_any_shape_activation_and_routing(dtype, isa, data):
    """Odd sizes, strided rows, ids that are -1, too large or another rank's, biases, weights on the input."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 10**6)))
    activation = draw(st.sampled_from(ACTIVATIONS))
    experts, top_k = draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 3))
    hidden_size, inner = draw(st.sampled_from([1, 7, 16, 48, 130])), draw(st.sampled_from([1, 5, 16, 33, 64]))
    rows = draw(st.sampled_from([0, 1, 2, 13, 29, 130]))
    weights = make_weights(experts, hidden_size, inner, dtype, activation, bias=draw(st.booleans()))
    hidden = torch.randn(rows, hidden_size + 3).to(dtype)[:, :hidden_size]
    id_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    ids = torch.randint(-2, 2 * experts + 2, (rows, 2 * top_k), dtype=id_dtype)[:, ::2]
    expert_map = torch.randint(-1, experts, (2 * experts,), dtype=torch.int32) if draw(st.booleans()) else None
    check(
        hidden,
        torch.rand(rows, top_k + 1)[:, :top_k],
        ids,
        weights,
        isa,
        activation=activation,
        expert_map=expert_map,
        apply_router_weight_on_input=draw(st.booleans()),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=KIND_IDS)
def test_packed_weights_change_no_bit(dtype, isa, activation):
    """Weights repacked in place give the same bits; rows of about 6 to 93 per expert."""
    torch.manual_seed(1)
    weights = make_weights(5, 48, 32, dtype, activation, bias=True)
    packed = pack_weights(copy_of(weights))
    assert isinstance(packed, PackedExpertWeights)
    hidden, topk_weights = torch.randn(90, 48).to(dtype), torch.rand(90, 2)
    ids = torch.multinomial(torch.tensor([1.0, 2, 4, 8, 16]), 180, replacement=True).view(90, 2)
    plain, from_packed = (
        NativeExperts(isa).apply(hidden, topk_weights, ids, w, activation=activation) for w in (weights, packed)
    )
    assert torch.equal(plain, from_packed)
    assert_close(plain, REFERENCE.apply(hidden.float(), topk_weights, ids, wide(weights), activation=activation))


def test_packing_shares_memory_and_keeps_what_cannot_be_packed():
    weights = make_weights(2, 32, 16, torch.bfloat16)
    packed = pack_weights(weights)
    assert packed.w13.data_ptr() == weights.w13.data_ptr()
    assert pack_weights(packed) is packed
    for odd in (make_weights(2, 30, 16, torch.bfloat16), make_weights(2, 32, 16, torch.float64)):
        before = odd.w13.clone()
        assert pack_weights(odd) is odd
        assert torch.equal(odd.w13, before)


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_and_order_change_no_bit(dtype, isa, threads):
    """The same bits on any number of threads, and for a row whatever rows it is computed with."""
    torch.manual_seed(2)
    weights = make_weights(6, 64, 96, dtype)
    hidden, topk_weights = torch.randn(50, 64).to(dtype), torch.rand(50, 3)
    ids = torch.randint(0, 6, (50, 3))
    experts = NativeExperts(isa)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = experts.apply(hidden, topk_weights, ids, weights)
        torch.set_num_threads(threads)
        assert torch.equal(experts.apply(hidden, topk_weights, ids, weights), want)
        alone = [experts.apply(hidden[i : i + 1], topk_weights[i : i + 1], ids[i : i + 1], weights) for i in range(50)]
        assert torch.equal(torch.cat(alone), want)
    finally:
        torch.set_num_threads(before)


AMX = {"amx_tile", "amx_bf16"} <= set(CPU_INFO.read_text().split() if CPU_INFO.exists() else ())
REFUSED = """
import ctypes
import torch
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 4096)), None) == 0
from vllm_ascend_moe.experts.native import available_isas
print(*available_isas(torch.bfloat16))
"""


@pytest.mark.skipif(not AMX, reason="the processor has no AMX for bf16")
def test_amx_is_the_choice_for_bf16_unless_linux_refuses_the_tiles():
    """Refused: to a process that has a signal stack too small for them."""
    assert available_isas(torch.bfloat16)[:2] == ["amx_bf16", "avx512_bf16"]
    assert "amx_bf16" not in available_isas(torch.float16) + available_isas(torch.float32)
    refused = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    assert refused.stdout.split()[0] == "avx512_bf16"


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=KIND_IDS)
def test_unrouted_rows_are_zero_and_their_nan_stays_out(dtype, isa):
    """Pad rows hold NaN and id -1: they give exactly 0 and change no other row; `out` is written in every row."""
    torch.manual_seed(3)
    weights = make_weights(4, 16, 16, dtype)
    hidden, topk_weights = torch.randn(12, 16).to(dtype), torch.rand(12, 2)
    ids = torch.randint(0, 4, (12, 2))
    hidden[5:9], topk_weights[5:9], ids[5:9] = float("nan"), float("nan"), -1
    out = torch.full((12, 16), float("nan"), dtype=dtype)
    got = NativeExperts(isa).apply(hidden, topk_weights, ids, weights, out=out)
    assert got is out
    assert torch.equal(out[5:9], torch.zeros(4, 16, dtype=dtype))
    keep = [0, 1, 2, 3, 4, 9, 10, 11]
    assert_close(out[keep], REFERENCE.apply(hidden[keep].float(), topk_weights[keep], ids[keep], wide(weights)))


@pytest.mark.parametrize("ids", [[[0, 1]] * 40, [[2, -1]] * 40, [[-1, -1]] * 40, [[4, 99]] * 40])
def test_extreme_routings(ids):
    """All rows to the same experts, to one, to none, to ids out of range."""
    torch.manual_seed(4)
    weights = make_weights(4, 32, 48, torch.bfloat16)
    check(torch.randn(40, 32).bfloat16(), torch.rand(40, 2), torch.tensor(ids), weights, "")


def test_more_rows_than_one_chunk_of_scratch():
    """Work is cut into chunks that fit 128 MiB of scratch; every row is still computed."""
    torch.manual_seed(5)
    weights = make_weights(3, 128, 128, torch.float32)
    rows = 70_000  # two choices of 1 KiB scratch each: 65,536 rows a chunk
    hidden, topk_weights = torch.randn(rows, 128), torch.rand(rows, 2)
    ids = torch.randint(-1, 3, (rows, 2), dtype=torch.int32)
    got = NativeExperts().apply(hidden, topk_weights, ids, weights)
    some = torch.tensor([0, 1, 65_535, 65_536, 69_999])
    assert_close(got[some], REFERENCE.apply(hidden[some], topk_weights[some], ids[some], weights))
    assert_close(got, TorchExperts().apply(hidden, topk_weights, ids, weights))


@pytest.mark.parametrize("out_kind", ["none", "strided", "transposed", "wider"])
def test_output_of_any_layout(out_kind):
    torch.manual_seed(6)
    weights = make_weights(2, 16, 16, torch.bfloat16)
    hidden, topk_weights, ids = torch.randn(7, 16).bfloat16(), torch.rand(7, 1), torch.randint(0, 2, (7, 1))
    out = {
        "none": None,
        "strided": torch.empty(7, 40, dtype=torch.bfloat16)[:, 8:24],
        "transposed": torch.empty(16, 7, dtype=torch.bfloat16).t(),
        "wider": torch.empty(7, 16),
    }[out_kind]
    got = NativeExperts().apply(hidden, topk_weights, ids, weights, out=out)
    assert out is None or got is out
    assert_close(got.bfloat16(), REFERENCE.apply(hidden.float(), topk_weights, ids, wide(weights)))


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("packed", [False, True])
def test_batched_format(dtype, isa, packed):
    """Expert by expert; rows past each count are neither read (NaN) nor written."""
    torch.manual_seed(7)
    weights = make_weights(5, 32, 48, dtype, bias=True)
    used = pack_weights(copy_of(weights)) if packed else weights
    counts = torch.tensor([3, 0, 20, 1, 13], dtype=torch.int32)
    hidden = torch.full((5, 20, 32), float("nan")).to(dtype)
    for expert, count in enumerate(counts.tolist()):
        hidden[expert, :count] = torch.randn(count, 32)
    out = torch.full((5, 20, 32), 77.0, dtype=dtype)
    got = NativeExperts(isa).apply_batched(hidden, counts, used, out=out)
    assert got is out
    want = REFERENCE.apply_batched(hidden.float(), counts, wide(weights))
    for expert, count in enumerate(counts.tolist()):
        assert_close(got[expert, :count], want[expert, :count])
        assert (got[expert, count:] == 77.0).all()


def test_batched_quantised_payload():
    torch.manual_seed(8)
    weights, counts = make_weights(2, 32, 16, torch.bfloat16), torch.tensor([4, 2])
    hidden = torch.randint(-127, 128, (2, 5, 32), dtype=torch.int8)
    scales = torch.rand(2, 5) / 100
    got = NativeExperts().apply_batched(hidden, counts, weights, scales=scales)
    want = REFERENCE.apply_batched(hidden, counts, weights, scales=scales)
    assert got.dtype == torch.bfloat16
    for expert, count in enumerate(counts.tolist()):
        assert_close(got[expert, :count], want[expert, :count])


def test_dtypes_without_kernels_run_in_plain_torch():
    torch.manual_seed(9)
    weights = make_weights(3, 16, 16, torch.float64)
    hidden, topk_weights, ids = torch.randn(6, 16).double(), torch.rand(6, 2), torch.randint(-1, 4, (6, 2))
    got = NativeExperts().apply(hidden, topk_weights, ids, weights)
    assert got.dtype == torch.float64
    assert_close(got, REFERENCE.apply(hidden, topk_weights, ids, weights))


def test_errors_name_what_is_wrong():
    weights = make_weights(2, 16, 16, torch.bfloat16)
    hidden, topk_weights, ids = torch.randn(3, 16).bfloat16(), torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    experts = NativeExperts()
    with pytest.raises(InvalidValueError, match="activation = 'tanh'"):
        experts.apply(hidden, topk_weights, ids, weights, activation="tanh")
    with pytest.raises(ShapeError, match=r"hidden.shape\[-1\] = 8, but it must be 16"):
        experts.apply(hidden[:, :8], topk_weights, ids, weights)
    with pytest.raises(ShapeError, match=r"w13.shape = \(2, 32, 16\), but it must be \(2, 16, 16\)"):
        experts.apply(hidden, topk_weights, ids, weights, activation="silu_no_mul")
    with pytest.raises(ShapeError, match=r"topk_ids\.shape"):
        experts.apply(hidden, topk_weights, ids[:2], weights)
    with pytest.raises(ShapeError, match="as the packed weights"):
        experts.apply(hidden.float(), topk_weights, ids, pack_weights(weights))
    with pytest.raises(InvalidValueError, match="isa = 'sse'"):
        NativeExperts("sse")
    with pytest.raises(ValueError, match=r"expert_num_tokens\[1\] = 4 is not between 0 and 3 rows"):
        experts.apply_batched(hidden.expand(2, 3, 16), torch.tensor([0, 4]), make_weights(2, 16, 16, torch.bfloat16))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    weights = make_weights(2, 16, 16, torch.bfloat16, bias=True)
    used = pack_weights(weights) if packed else weights
    hidden, topk_weights, ids = torch.randn(3, 16).bfloat16(), torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    tensors = (used.w13, used.w2, used.w13_bias, used.w2_bias)
    ops, check_op = torch.ops.ascend_moe, torch.library.opcheck
    out = torch.empty_like(hidden)
    check_op(ops.grouped_mlp.default, (out, hidden, *tensors, topk_weights, ids, None, "silu", False, packed, ""))
    batched = hidden.expand(2, 3, 16).contiguous()
    counts = torch.tensor([1, 3])
    check_op(ops.batched_mlp.default, (torch.empty_like(batched), batched, counts, *tensors, "silu", packed, ""))
    check_op(ops.pack_expert_weights_.default, (torch.randn(1, 16, 4),))
