"""Operators of torch_npu by name, looked up once: in the call of a layer a look-up costs as much as a small operator,
and torch.compile cannot trace an import."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from vllm_ascend_moe.errors import MissingDependencyError


def npu_operator(name: str) -> Any:
    """The operator ``torch.ops.npu.name``.

    Raises:
        MissingDependencyError: torch_npu is not installed, or has no such operator.
    """
    try:
        import_module("torch_npu")
        return getattr(torch.ops.npu, name)
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"{name} needs torch_npu ({error}). Install the torch-npu of your torch version, or choose "
            'experts = "auto" and comm = "auto".'
        ) from error
