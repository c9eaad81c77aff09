"""Models and single-engine results, made once for all engine tests: an engine takes half a minute to start."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from vllm_ascend_moe.integration.generate import EngineSpec, Generated, Request, generate
from vllm_ascend_moe.testing.tiny_models import make_tiny_model

# Prompts of very different lengths: ranks prefill and decode different numbers of tokens in the same step.
PROMPT_LENGTHS = (5, 33, 1, 17, 64, 3, 120, 2, 1, 200)
# Six at once; then one alone, so that every other rank is idle; then one on the other rank; then 1 and 200 tokens.
WAVES = [[0, 1, 2, 3, 4, 5], [6], [7], [8, 9]]
# For servers: this many requests of random length, beyond those above.
BURST = 50


def make_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request([rng.randrange(256) for _ in range(length)], max_tokens=4 + index % 3 * 3)
        for index, length in enumerate(PROMPT_LENGTHS)
    ]


def make_burst() -> list[Request]:
    """Requests of random length, to be sent all at once."""
    rng = random.Random(50)
    return [
        Request([rng.randrange(256) for _ in range(rng.randint(1, 200))], max_tokens=rng.randint(1, 8))
        for _ in range(BURST)
    ]


def on_ranks(requests: list[Request], dp: int) -> list[Request]:
    """The same requests, dealt to DP ranks in turn (so those of the last waves go to different ranks)."""
    return [Request(r.prompt, r.max_tokens, dp_rank=index % dp) for index, r in enumerate(requests)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """model_path(kind, dtype) -> folder."""
    root: Path = tmp_path_factory.mktemp("models")

    @cache
    def path(kind: str, dtype: str = "float32") -> str:
        return str(make_tiny_model(kind, root / f"{kind}-{dtype}", dtype=getattr(torch, dtype)))

    return path


@pytest.fixture(scope="session")
def single_engine(model_path: Callable[[str, str], str]) -> Callable[[str, str], list[Generated]]:
    """single_engine(kind, dtype) -> what one stock vLLM engine generates for make_requests, and for the servers'
    model then for make_burst."""

    @cache
    def results(kind: str, dtype: str = "float32") -> list[Generated]:
        requests, waves = make_requests(0), list(WAVES)
        if kind == "qwen3_moe":
            waves.append(list(range(len(requests), len(requests) + BURST)))
            requests += make_burst()
        spec = EngineSpec(model_path(kind, dtype), requests, stock=True, dtype=dtype, waves=waves)
        return generate(spec, timeout_s=480)

    return results
