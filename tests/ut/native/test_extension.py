"""The native extension is there and loads. The other tests of this folder skip without it, for machines where it was
left out on purpose; without this test a build that does not load would pass unseen. `make test` always builds it."""

from __future__ import annotations

import os

import pytest

from vllm_ascend_moe.ops.extension import native_available


@pytest.mark.skipif(os.environ.get("ASCEND_MOE_BUILD") == "0", reason="ASCEND_MOE_BUILD=0: left out on purpose")
def test_extension_loads() -> None:
    assert native_available(), "build it: ASCEND_MOE_BUILD=1 pip install --no-build-isolation -e ."
