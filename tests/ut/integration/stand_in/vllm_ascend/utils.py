import os
from enum import Enum


class AscendDeviceType(Enum):
    A2 = 0
    A3 = 1
    A5 = 3


def get_ascend_device_type() -> AscendDeviceType:
    return AscendDeviceType[os.environ.get("STAND_IN_DEVICE", "A2")]


def enable_sp_by_pass() -> bool:
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX

    return bool(getattr(_EXTRA_CTX._ctx(), "sp_by_pass", False))
