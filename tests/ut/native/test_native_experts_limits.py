"""Native CPU experts at their limits: every number of rows, what earlier calls left, infinity, subnormal values, pages
that cannot be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_cases import KIND_IDS, KINDS, REFERENCE, copy_of, make_weights, wide

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NativeExperts, pack_weights
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.testing.compare import assert_close

pytestmark = pytest.mark.skipif(not native_available(), reason="the native extension is not built")
NAN, INF = float("nan"), float("inf")
KINDS_OF = pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=KIND_IDS)


@pytest.fixture
def one_thread():
    """Every call runs on this thread: what one leaves in scratch and on the stack, the next one finds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def apply(isa, hidden, weights, activation="silu", **options) -> torch.Tensor:
    """All rows to expert 0, with weight 1."""
    ids, ones = torch.zeros(len(hidden), 1, dtype=torch.int32), torch.ones(len(hidden), 1)
    return NativeExperts(isa).apply(hidden, ones, ids, weights, activation=activation, **options)


@KINDS_OF
@pytest.mark.parametrize(("hidden_size", "inner"), [(81, 47), (64, 32)])
def test_every_number_of_rows(dtype, isa, hidden_size, inner):
    """1 to 66 rows of one expert, so blocks of every size: the bits that each row has alone."""
    torch.manual_seed(1)
    weights, hidden = make_weights(1, hidden_size, inner, dtype), torch.randn(66, hidden_size).to(dtype)
    alone = torch.cat([apply(isa, row, weights) for row in hidden.split(1)])
    ids, ones = torch.zeros(66, 1, dtype=torch.int32), torch.ones(66, 1)
    assert_close(alone, REFERENCE.apply(hidden.float(), ones, ids, wide(weights)))
    for rows in range(1, 67):
        assert torch.equal(apply(isa, hidden[:rows], weights), alone[:rows]), rows


@KINDS_OF
@pytest.mark.parametrize("activation", ["silu", "silu_no_mul", "swigluoai"])
@pytest.mark.parametrize(("hidden_size", "inner"), [(1, 1), (33, 5), (47, 17), (48, 80), (66, 34)])
def test_what_earlier_calls_left_changes_no_bit(one_thread, dtype, isa, activation, hidden_size, inner):
    """A larger call leaves NaN wherever it had weights or rows."""
    torch.manual_seed(2)
    weights = make_weights(1, hidden_size, inner, dtype, activation, bias=True)
    hidden = torch.randn(29, hidden_size).to(dtype)
    before = apply(isa, hidden, weights, activation)
    poison = ExpertWeights(
        w13=torch.full((1, 95 if activation == "silu_no_mul" else 190, 95), NAN, dtype=dtype),
        w2=torch.full((1, 95, 95), NAN, dtype=dtype),
    )
    assert apply(isa, torch.full((70, 95), NAN, dtype=dtype), poison, activation).isnan().all()
    after = apply(isa, hidden, weights, activation)
    assert before.isfinite().all()
    assert torch.equal(before, after)


@KINDS_OF
@pytest.mark.parametrize("activation", ["relu2", "relu2_no_mul"])
@pytest.mark.parametrize(("inner", "packed"), [(48, True), (48, False), (33, False), (5, False)])
@pytest.mark.parametrize("value", [INF, NAN])
def test_infinity_and_nan_stay_what_they_are_and_in_their_row(dtype, isa, activation, inner, packed, value):
    """All weights are positive, so infinity is the reference's result too, whatever k is padded to."""
    torch.manual_seed(3)
    weights = make_weights(1, 48, inner, dtype, activation)
    positive = ExpertWeights(w13=weights.w13.abs() + 0.125, w2=weights.w2.abs() + 0.125)
    used = pack_weights(copy_of(positive)) if packed else positive
    hidden = torch.rand(20, 48).to(dtype)
    want = apply(isa, hidden, used, activation)
    hidden[17, 3] = value
    got = apply(isa, hidden, used, activation)
    torch.testing.assert_close(got[17], torch.full((48,), value, dtype=dtype), equal_nan=True)
    keep = [row for row in range(20) if row != 17]
    assert torch.equal(got[keep], want[keep])


@KINDS_OF
def test_values_are_rounded_to_nearest_even(dtype, isa):
    """Squares are exact in fp32 and both weights the identity: every bit of the result is the rounding's."""
    torch.manual_seed(4)
    hidden = (torch.rand(40, 64) + 0.5).to(dtype)
    identity = torch.eye(64, dtype=dtype)[None]
    got = apply(isa, hidden, ExpertWeights(w13=identity, w2=identity), "relu2_no_mul")
    assert torch.equal(got, hidden.float().square().to(dtype))


@KINDS_OF
def test_subnormal_values_count_as_zero_in_bf16_instructions_alone(dtype, isa):
    """As the docstring of NativeExperts says: 2**-130 times 2**100 is 2**-30, or 0."""
    if dtype == torch.float16:
        tiny, large = 2.0**-24, 2.0**10
    else:
        tiny, large = 2.0**-130, 2.0**100
    weights = ExpertWeights(
        w13=torch.full((1, 16, 16), tiny, dtype=dtype), w2=torch.full((1, 16, 16), 1024.0, dtype=dtype)
    )
    hidden = torch.full((2, 16), large, dtype=dtype)
    got = apply(isa, hidden, weights, "gelu_no_mul")
    if isa.endswith("_bf16"):
        assert torch.equal(got, torch.zeros_like(got))
    else:
        ids, ones = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
        want = REFERENCE.apply(hidden.float(), ones, ids, wide(weights), activation="gelu_no_mul")
        assert_close(got, want)


@KINDS_OF
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("hidden_size", "inner"), [(0, 16), (16, 0), (0, 0)])
def test_sizes_of_zero(dtype, isa, hidden_size, inner, packed):
    """Sums over nothing are zero: what is left are biases."""
    torch.manual_seed(5)
    weights = make_weights(1, hidden_size, inner, dtype, bias=True)
    used = pack_weights(copy_of(weights)) if packed else weights
    hidden = torch.randn(3, hidden_size).to(dtype)
    want = REFERENCE.apply_batched(hidden[None].float(), torch.tensor([3]), wide(weights))[0]
    assert_close(apply(isa, hidden, used), want)
    assert_close(NativeExperts(isa).apply_batched(hidden[None], torch.tensor([3]), used)[0], want)


def test_nothing_past_the_end_is_touched():
    """A process whose tensors all end where a page begins that can be neither read nor written."""
    script = Path(__file__).with_name("guarded_calls.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, f"{run.returncode} after {run.stdout[-200:]} {run.stderr[-2000:]}"
    assert run.stdout.split("\n")[-2] == f"{len(KINDS)} kinds"
