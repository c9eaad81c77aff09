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
PROMPT_LENGTHS = (5, 33, 1, 17, 64, 3, 120, 2)
# All but two at once; then one alone, so that every other rank is idle; then one on the other rank.
WAVES = [[0, 1, 2, 3, 4, 5], [6], [7]]


def make_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request([rng.randrange(256) for _ in range(length)], max_tokens=6 + index % 3 * 4)
        for index, length in enumerate(PROMPT_LENGTHS)
    ]


def on_ranks(requests: list[Request], dp: int) -> list[Request]:
    """The same requests, dealt to DP ranks in turn (the last two to different ranks)."""
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
    """single_engine(kind, dtype) -> what one stock vLLM engine generates for make_requests."""

    @cache
    def results(kind: str, dtype: str = "float32") -> list[Generated]:
        spec = EngineSpec(model_path(kind, dtype), make_requests(0), stock=True, dtype=dtype, waves=WAVES)
        return generate(spec)

    return results
