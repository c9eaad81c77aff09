"""Operators of torch_npu by name, looked up once: in the call of a layer a look-up costs as much as a small operator,
and torch.compile cannot trace an import."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from vllm_ascend_moe.errors import MissingDependencyError

_libraries: list[torch.library.Library] = []


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


@cache
def token_unpermute_operator() -> Any:
    """``torch.ops.ascend_moe.npu_token_unpermute(rows [A, H], positions int32 [T * K], probs [T, K]) -> [T, H]``.

    torch_npu's npu_moe_token_unpermute as one operator whose result is new. As torch_npu has it, a graph holds
    ``_npu_moe_token_unpermute``, which returns its input as a second result without saying so in its schema:
    torch.compile warns of that, and refuses it where the environment has CI, as later versions are to do always.

    Raises:
        MissingDependencyError: as :func:`npu_operator`.
    """
    unpermute = npu_operator("npu_moe_token_unpermute")

    def real(rows: torch.Tensor, positions: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = unpermute(rows, positions, probs=probs)
        return result

    def fake(rows: torch.Tensor, positions: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return rows.new_empty((probs.shape[0], rows.shape[1]))

    library = torch.library.Library("ascend_moe", "FRAGMENT")
    library.define("npu_token_unpermute(Tensor rows, Tensor positions, Tensor probs) -> Tensor")
    library.impl("npu_token_unpermute", real, "PrivateUse1")
    torch.library.register_fake("ascend_moe::npu_token_unpermute", fake, lib=library)
    _libraries.append(library)
    return torch.ops.ascend_moe.npu_token_unpermute
