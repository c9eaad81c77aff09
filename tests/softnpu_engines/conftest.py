"""Engine tests on the soft NPU: collected only where they are named (`make softnpu-engines`), since they need
vllm-ascend in a folder of its own, and minutes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.softnpu_engines.engine import check_ready, make_requests
from vllm_ascend_moe.integration.generate import EngineSpec, Generated, generate
from vllm_ascend_moe.testing.tiny_models import make_tiny_model


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("softnpu_engines" in argument for argument in config.args) else True


@pytest.fixture(scope="session", autouse=True)
def _ready() -> None:
    check_ready()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """model_path(kind) -> folder of a tiny bf16 model."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def path(kind: str) -> str:
        return str(make_tiny_model(kind, root / kind, dtype=torch.bfloat16))

    return path


@pytest.fixture(scope="session")
def stock_cpu(model_path: Callable[[str], str]) -> Callable[[str], list[Generated]]:
    """stock_cpu(kind) -> what one stock vLLM engine generates on the CPU, in bf16."""

    @cache
    def results(kind: str) -> list[Generated]:
        return generate(EngineSpec(model_path(kind), make_requests(), stock=True, dtype="bfloat16"), timeout_s=900)

    return results
