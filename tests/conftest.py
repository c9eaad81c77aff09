"""What a test draws follows from its name alone: not from the tests that ran before it in the same process.

An operator of a compiled graph that returns its input, and does not say so, is an error in every test and in the
processes that tests start, not only where the environment has CI.
"""

from __future__ import annotations

import os
import random
import zlib

import pytest

os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"

import torch  # reads the variable


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures, which draw too."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)
