"""These tests run on the soft NPU only (`make softnpu-test`): torch_npu must not be where the others run."""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("ASCEND_MOE_SOFTNPU") == "1" else ["*"]

# compile_npu.py shares steps and contexts with the CPU tests of the same operators.
sys.path.insert(0, str(Path(__file__).parents[1] / "ut"))

if os.environ.get("ASCEND_MOE_SOFTNPU") == "1":
    import forked_ranks

    forked_ranks.install()
