import os

from vllm.utils.torch_utils import direct_register_custom_op

import vllm_ascend.ops.fused_moe.prepare_finalize  # noqa: F401
import vllm_ascend.ops.register_custom_ops as ops

# In a process where our own operators have the names, the stand-in's functions are called directly.
if os.environ.get("STAND_IN_REGISTERS") == "1":
    for name, real, fake in (
        (
            "maybe_all_gather_and_maybe_unpad",
            ops._maybe_all_gather_and_maybe_unpad_impl,
            ops._maybe_all_gather_and_maybe_unpad_fake,
        ),
        ("maybe_pad_and_reduce", ops._maybe_pad_and_reduce_impl, ops._maybe_pad_and_reduce_fake),
    ):
        direct_register_custom_op(name, real, mutates_args=[], fake_impl=fake, dispatch_key="CPU")
