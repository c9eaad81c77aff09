"""Without the extension everything still works, in plain torch, and says so once."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NativeExperts, available_isas, pack_weights
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.ops import native
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.testing.compare import assert_close


@pytest.fixture
def no_extension(monkeypatch):
    """The import of the extension fails, as where it was never built."""
    monkeypatch.setitem(sys.modules, "vllm_ascend_moe._native", None)
    native_available.cache_clear()
    native._names.clear()
    yield
    native_available.cache_clear()
    native._names.clear()


def test_logged_once(no_extension, caplog):
    with caplog.at_level(logging.WARNING):
        assert not native_available()
        assert not native_available()
    assert len([r for r in caplog.records if "pip install" in r.message]) == 1
    assert available_isas(torch.bfloat16) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_run_in_plain_torch(no_extension, dtype):
    torch.manual_seed(0)
    weights = ExpertWeights(w13=torch.randn(3, 32, 16).to(dtype) / 4, w2=torch.randn(3, 16, 16).to(dtype) / 4)
    assert pack_weights(weights) is weights
    hidden, ids = torch.randn(9, 16).to(dtype), torch.randint(-1, 4, (9, 2))
    topk_weights = torch.rand(9, 2)
    got = NativeExperts().apply(hidden, topk_weights, ids, weights)
    assert_close(got, ReferenceExperts().apply(hidden.float(), topk_weights, ids, weights))


def test_groups_use_plain_torch(no_extension, monkeypatch):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = native.TorchGroup(dist.group.WORLD)
        assert native.native_group_name(group) is None
        assert native.padded_all_gather(torch.ones(1, 2), 2, group).tolist() == [[1, 1], [0, 0]]
    finally:
        dist.destroy_process_group()
