"""Quantised payloads: what comes back of a token, and what is refused. No process group; with real ranks and all
strategies see test_all_strategies.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.comm.base import ActivationFormat
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.comm.payload import QuantizedDispatch, dequantize_tokens, quantize_tokens
from vllm_ascend_moe.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_equal
from vllm_ascend_moe.testing.fake_group import run_ranks

READ_AS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PAYLOADS = pytest.mark.parametrize("payload", READ_AS)

# Up to 2^127: at the last number below infinity, scale * 127 may round to infinity.
tokens = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=9)


def there_and_back(x, payload, dtype=torch.float32):
    values, scales = quantize_tokens(x, payload)
    return dequantize_tokens(values.view(READ_AS[payload]), scales, dtype)


def bound(x, payload):
    """What a token may be off by, element by element, as quantize_tokens promises; 4 fp32 roundings on top."""
    scale = x.double().abs().amax(-1, keepdim=True) / {"int8": 127, "fp8": 448}[payload]
    step = scale / 2 if payload == "int8" else torch.maximum(x.double().abs() / 16, scale / 1024)
    return step + x.double().abs() * 2.0**-22 + torch.finfo(torch.float32).tiny


@PAYLOADS
@given(rows=st.lists(tokens, min_size=1, max_size=4))
def test_every_element_comes_back_within_its_bound(payload, rows):
    """Whatever the sizes of the elements: subnormal and huge ones of fp32, and tokens of zeros."""
    for row in rows:
        x = torch.tensor([row])
        assert ((there_and_back(x, payload).double() - x.double()).abs() <= bound(x, payload)).all()


@PAYLOADS
def test_the_bound_is_no_larger_than_need_be(payload):
    """Some element of 4096 uses nine tenths of what it may: a scale twice too large, or truncation, fails above."""
    x = data.hidden_states(0, torch.arange(8), 512, torch.float32)
    used = (there_and_back(x, payload).double() - x.double()).abs() / bound(x, payload)
    assert 0.9 < used.max() <= 1
    assert ((there_and_back(x, payload) - x).mean() / x.abs().mean()).abs() < 1e-3, "rounding leans to one side"


@PAYLOADS
def test_the_largest_element_and_its_negative_come_back_whole(payload):
    x = torch.tensor([[3.0, -3.0, 0.0], [-0.001, 0.001, 0.0]])
    torch.testing.assert_close(there_and_back(x, payload), x, rtol=2e-7, atol=0)


@PAYLOADS
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_token_with_a_fault_is_nan_throughout_and_its_neighbours_are_not(payload, fault):
    x = torch.tensor([[1.0, 2.0], [fault, 2.0], [0.5, 0.25]])
    back = there_and_back(x, payload)
    assert back[1].isnan().all()
    # Times a scale of infinity, any other value would be infinity.
    assert (quantize_tokens(x, payload)[0][1].view(READ_AS[payload]).float() == 0).all()
    assert_equal(back[[0, 2]], there_and_back(x[[0, 2]], payload))


@PAYLOADS
def test_zeros_have_a_scale_and_stay_zeros(payload):
    values, scales = quantize_tokens(torch.zeros(2, 3), payload)
    assert (scales > 0).all()
    assert_equal(dequantize_tokens(values.view(READ_AS[payload]), scales, torch.float32), torch.zeros(2, 3))


@PAYLOADS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 5)], ids=str)
def test_one_byte_an_element_and_one_scale_a_token(payload, dtype, shape):
    values, scales = quantize_tokens(torch.ones(shape, dtype=dtype), payload)
    assert (values.shape, values.element_size()) == (shape, 1)
    assert values.dtype == (torch.int8 if payload == "int8" else torch.uint8), "collectives do not take fp8"
    assert (scales.shape, scales.dtype) == (shape[:1], torch.float32)
    assert there_and_back(torch.ones(shape, dtype=dtype), payload, dtype).dtype == dtype


@PAYLOADS
def test_pad_rows_and_idle_ranks(payload):
    """Rows that no rank sent come out as zeros with id -1; a rank without tokens sends and gets them alike."""

    def body(rank, group):
        layout = TokenLayout.of([2, 0], rank)
        ids = data.token_ids(layout, rank)
        comm = QuantizedDispatch(PaddedAllGather(group), payload)
        hidden = data.hidden_states(0, ids, 4, torch.bfloat16)
        sent = comm.dispatch(
            hidden, data.topk_weights(0, ids, 2), data.topk_ids(0, ids, 2, 4), num_experts=4, layout=layout
        )
        assert (sent.hidden.dtype, sent.scales) == (torch.bfloat16, None)
        assert (sent.topk_ids[2:] == -1).all()
        assert_equal(sent.hidden[2:], torch.zeros(2, 4, dtype=torch.bfloat16))
        first = data.hidden_states(0, torch.arange(2), 4, torch.bfloat16)
        assert_equal(sent.hidden[:2], there_and_back(first, payload, torch.bfloat16))
        assert comm.combine(sent.hidden, sent.handle).shape == hidden.shape

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("hidden", "scales", "error", "message"),
    [
        (torch.zeros(2, 4), torch.ones(2), ShapeError, "scales"),
        (torch.zeros(2, 4, dtype=torch.int8), None, DtypeError, "hidden.dtype = torch.int8"),
        (torch.zeros(2, 4).to(torch.float8_e4m3fn), None, DtypeError, "2 bytes or more"),
    ],
    ids=["scales", "int8", "fp8"],
)
def test_what_is_quantised_already_is_refused(hidden, scales, error, message):
    def body(rank, group):
        QuantizedDispatch(PaddedAllGather(group), "int8").dispatch(
            hidden,
            torch.ones(2, 1),
            torch.zeros(2, 1, dtype=torch.int32),
            num_experts=1,
            layout=TokenLayout.of([2], 0),
            scales=scales,
        )

    with pytest.raises(error, match=message):
        run_ranks(1, body)


def test_wrong_configurations_are_refused():
    def make(*args, **options):
        return run_ranks(1, lambda rank, group: QuantizedDispatch(PaddedAllGather(group), *args, **options))

    with pytest.raises(InvalidValueError, match="payload = 'int4', but it must be 'int8' or 'fp8'"):
        make("int4")
    with pytest.raises(UnsupportedError, match="experts of the rows format take no scales"):
        make("int8", dequantize=False)
    assert make("fp8")[0].format is ActivationFormat.ROWS
