"""One-token steps are rounded up where activations stay sequence parallel between layers, and nothing else changes.
That the answers are right is tested with real engines (DeepSeek-V3 with DP=2 x TP=2, one request alone)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_ascend_moe.errors import InvalidValueError, UnsupportedError
from vllm_ascend_moe.integration.cpu_platform import AscendMoECpuPlatform
from vllm_ascend_moe.integration.cpu_worker import FewestTokensDispatcher
from vllm_ascend_moe.integration.strategies import buffers_of, close_buffers, describe_buffers


@dataclass
class Recorder:
    """Stands for vLLM's dispatcher: keeps what it was asked for."""

    cudagraph_keys: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[int, dict[str, object]]] = field(default_factory=list)

    def dispatch(self, num_tokens: int, **kwargs: object) -> int:
        self.asked.append((num_tokens, kwargs))
        return num_tokens


def test_only_one_token_is_rounded_up() -> None:
    inner = Recorder({"a": 1})
    dispatcher = FewestTokensDispatcher(inner)
    assert [dispatcher.dispatch(num_tokens=n, has_lora=True) for n in (1, 2, 3, 64)] == [2, 2, 3, 64]
    assert inner.asked[0] == (2, {"has_lora": True})
    assert dispatcher.cudagraph_keys == {"a": 1}


WORKER = "vllm_ascend_moe.integration.cpu_worker.AscendMoECPUWorker"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch):
    """checked(...) -> the parallel configuration after our platform has seen it; vLLM's own part is left out."""
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None))

    def check(worker_cls: str = "auto", quantization: str | None = None, transformers: bool = False, **sizes: object):
        parallel = ParallelConfig(worker_cls=worker_cls, **sizes)
        model = SimpleNamespace(
            quantization=quantization, using_transformers_backend=lambda: transformers, use_mla=False
        )
        config = SimpleNamespace(
            parallel_config=parallel,
            model_config=model,
            attention_config=SimpleNamespace(backend=None),
            additional_config={"ascend_moe": {"bind_cpus": False}},
        )
        AscendMoECpuPlatform.check_and_update_config(config)
        return parallel

    return check


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "ours"),
    [(2, 2, True, True), (2, 1, True, True), (1, 2, True, False), (2, 2, False, False)],
    ids=["dp-tp-ep", "no-tp", "no-dp", "no-ep"],
)
def test_chosen_exactly_where_layers_communicate(dp: int, tp: int, ep: bool, ours: bool, checked) -> None:
    parallel = checked(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=ep)
    assert (parallel.worker_cls == WORKER) is ours


def test_another_worker_is_kept_but_warned_of(checked, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.ascend_moe"):
        parallel = checked("my.Worker", data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True)
    assert parallel.worker_cls == "my.Worker"
    assert "worker_cls = my.Worker" in caplog.text


def test_layers_the_plugin_does_not_reach_are_refused(checked) -> None:
    with pytest.raises(UnsupportedError, match="Transformers backend"):
        checked(quantization="fp8", transformers=True, enable_expert_parallel=True)
    checked(quantization="fp8", transformers=True)
    checked(quantization="fp8", enable_expert_parallel=True)
    checked(transformers=True, enable_expert_parallel=True)


@pytest.mark.parametrize(
    ("mla", "dtype", "given", "chosen"),
    [
        (True, torch.float32, None, AttentionBackendEnum.CPU_MLA),
        (True, torch.float16, None, AttentionBackendEnum.CPU_MLA),
        (True, torch.bfloat16, None, None),
        (True, torch.float32, AttentionBackendEnum.AMX_MLA, AttentionBackendEnum.AMX_MLA),
        (False, torch.float32, None, None),
    ],
    ids=["fp32", "fp16", "bf16", "the user's choice", "no MLA"],
)
def test_mla_has_kernels_for_its_dtype_on_processors_with_amx(mla, dtype, given, chosen) -> None:
    """A part of vLLM's configuration stands in; that vLLM follows the choice, engine tests show where there is AMX."""
    attention = SimpleNamespace(backend=given)
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=mla, dtype=dtype), attention_config=attention)
    AscendMoECpuPlatform._choose_mla_backend(config)
    assert attention.backend is chosen


def test_buffers_are_shared_by_group_described_and_closed() -> None:
    """What the worker does when it ends."""
    one = buffers_of("dp")
    assert buffers_of("dp") is one
    assert buffers_of("ep") is not one
    assert describe_buffers() == ""
    one.get("rows", (4, 8), torch.float32)
    assert "group dp: 1 buffers, 128 bytes" in describe_buffers()
    close_buffers()
    assert describe_buffers() == ""
    with pytest.raises(InvalidValueError, match="closed"):
        one.get("rows", (4, 8), torch.float32)
