"""What a test draws follows from its name alone: not from the tests that ran before it in the same process."""

from __future__ import annotations

import random
import zlib

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures, which draw too."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)
