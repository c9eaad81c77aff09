"""One-token steps are rounded up where activations stay sequence parallel between layers, and nothing else changes.
That the answers are right is tested with real engines (DeepSeek-V3 with DP=2 x TP=2, one request alone)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from vllm.config import ParallelConfig

from vllm_ascend_moe.integration.cpu_worker import FewestTokensDispatcher


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


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "ours"),
    [(2, 2, True, True), (2, 1, True, False), (1, 2, True, False), (2, 2, False, False)],
    ids=["dp-tp-ep", "no-tp", "no-dp", "no-ep"],
)
def test_needed_exactly_where_vllm_makes_moe_sequence_parallel(dp: int, tp: int, ep: bool, ours: bool) -> None:
    config = ParallelConfig(data_parallel_size=dp, tensor_parallel_size=tp, enable_expert_parallel=ep)
    assert config.use_sequence_parallel_moe is ours
