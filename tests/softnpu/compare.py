"""An operator on the NPU against the same on the CPU."""

from collections.abc import Callable
from typing import Any

import torch


def tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def same_on_npu(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Values, shapes, dtypes and strides of ``function`` are those of the CPU, and the results are on the NPU."""
    wanted = tensors(function(*(t.clone() for t in inputs)))
    given = tensors(function(*(t.clone().npu() for t in inputs)))
    assert len(wanted) == len(given)
    for want, give in zip(wanted, given, strict=True):
        assert give.device.type == "npu"
        assert give.stride() == want.stride()
        torch.testing.assert_close(give.cpu(), want)  # checks shape and dtype too
