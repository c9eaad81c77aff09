"""The buffer cache: what is one buffer and what another, what is reported, and that closing is final."""

import doctest

import pytest
import torch

from vllm_ascend_moe.comm import batched_sizes, buffers
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.errors import InvalidValueError


@pytest.mark.parametrize("module", [buffers, batched_sizes], ids=lambda module: module.__name__)
def test_examples_of_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_the_same_request_gives_the_same_memory_and_another_does_not():
    cache = BufferCache()
    first = cache.get("rows", (3, 4), torch.float32)
    first.fill_(7)
    assert cache.get("rows", (3, 4), torch.float32, "cpu") is first
    others = [
        cache.get("sums", (3, 4), torch.float32),
        cache.get("rows", (4, 3), torch.float32),
        cache.get("rows", (3, 4), torch.int32),
    ]
    for other in others:
        other.zero_()
    assert (first == 7).all()
    assert len({x.data_ptr() for x in (first, *others)}) == 4
    assert BufferCache().get("rows", (3, 4), torch.float32).data_ptr() != first.data_ptr()
    meta = cache.get("rows", (3, 4), torch.float32, "meta")
    assert meta.device.type == "meta"


def test_buffers_are_contiguous_of_the_shape_asked_for_also_without_elements():
    cache = BufferCache()
    for shape in ((0, 4), (1,), (2, 3, 4)):
        buffer = cache.get("x", shape, torch.bfloat16)
        assert buffer.shape == shape
        assert buffer.is_contiguous()
        assert buffer.dtype == torch.bfloat16


def test_memory_is_counted_and_described_largest_first():
    cache = BufferCache()
    assert (cache.nbytes, cache.describe()) == (0, "0 buffers, 0 bytes")
    cache.get("small", (2,), torch.int64)
    cache.get("large", (10, 100), torch.bfloat16)
    cache.get("large", (10, 100), torch.bfloat16)
    assert cache.nbytes == 16 + 2000
    assert cache.describe().split("\n") == [
        "2 buffers, 2,016 bytes",
        "2,000 bytes: large [10, 100] bfloat16 on cpu",
        "16 bytes: small [2] int64 on cpu",
    ]


def test_a_buffer_made_in_inference_mode_can_be_written_to_outside_of_it():
    cache = BufferCache()
    with torch.inference_mode():
        buffer = cache.get("x", (2,), torch.float32)
        buffer.fill_(1)
    buffer.fill_(2)
    assert buffer.tolist() == [2, 2]


def test_a_closed_cache_holds_nothing_and_refuses_to_be_used():
    cache = BufferCache()
    cache.get("x", (2,), torch.float32)
    cache.close()
    cache.close()
    assert cache.nbytes == 0
    with pytest.raises(InvalidValueError, match="BufferCache = 'closed'"):
        cache.get("x", (2,), torch.float32)
