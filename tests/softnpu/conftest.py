"""These tests run on the soft NPU only (`make softnpu-test`): torch_npu must not be where the others run."""

import os

collect_ignore_glob = [] if os.environ.get("ASCEND_MOE_SOFTNPU") == "1" else ["*"]
