"""``python -m vllm_ascend_moe``."""

import sys

from vllm_ascend_moe.tools.cli import main

sys.exit(main())
