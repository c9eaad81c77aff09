"""Tests for Atlas A2. Without an NPU they are skipped; on the soft NPU, a CPU, the very same bodies run:

pytest tests/e2e/npu          on a host with NPUs, CANN and torch_npu (tests that need more NPUs are skipped)
make softnpu-test             on any host; see docs/softnpu.md
"""

import sys
from pathlib import Path

import pytest
import torch

HERE, UT = Path(__file__).parent, Path(__file__).parents[2] / "ut"
sys.path[:0] = [str(UT), str(UT / "comm")]


def npus() -> int:
    return torch.npu.device_count() if hasattr(torch, "npu") else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs an Ascend NPU with torch_npu; on the soft NPU: make softnpu-test")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.npu)
            if npus() == 0:
                item.add_marker(skip)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    """The parameter, where there are as many NPUs."""
    if npus() < request.param:
        pytest.skip(f"needs {request.param} NPUs, has {npus()}")
    return request.param
