"""vllm-ascend's own unit tests, from its source archive, with our functions in place of its own.

They run as vllm-ascend's CI runs them on a CPU: torch_npu is a mock there, so they prove calls, not results.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.softnpu_engines.engine import PLUGIN, SITE, SOURCE

pytestmark = pytest.mark.timeout(900)

# Everything under tests/ut of vllm-ascend 0.23.0.post1 that names one of the replaced functions or their classes.
FILES = (
    "tests/ut/ops/test_prepare_finalize.py",
    "tests/ut/ops/test_moe_comm_method.py",
    "tests/ut/ops/test_moe_runtime_args.py",
    "tests/ut/ops/test_fused_moe.py",
    "tests/ut/test_ascend_forward_context.py",
)


def run(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(PLUGIN)])}
    done = subprocess.run(
        [*command, *options, *FILES], cwd=SOURCE, env=env, capture_output=True, text=True, timeout=800, check=False
    )
    return done.stdout


def outcomes(output: str) -> str:
    """The last line, without the time."""
    return output.strip().splitlines()[-1].split(" in ")[0]


def test_the_same_pass_with_ours_in_place() -> None:
    theirs, ours = run(), run("-p", "softnpu_engines_padded")
    assert " passed" in outcomes(theirs), theirs[-3000:]
    assert outcomes(ours) == outcomes(theirs), ours[-5000:]
    assert "failed" not in outcomes(ours), ours[-5000:]
