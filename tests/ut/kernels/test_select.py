"""The Triton kernels by name; in this process triton can be imported."""

from __future__ import annotations

from vllm_ascend_moe.experts.batched_triton import TritonBatchedExperts
from vllm_ascend_moe.experts.rows_triton import TritonRowsExperts
from vllm_ascend_moe.experts.select import make_batched_experts, make_rows_experts


def test_triton_by_name_and_automatically_on_cuda() -> None:
    for name in ("auto", "triton"):
        assert type(make_rows_experts(name, "cuda")) is TritonRowsExperts
        batched = make_batched_experts(name, "cuda", expected_rows=64)
        assert type(batched) is TritonBatchedExperts
        assert batched.expected_rows == 64
