"""One operator for NPU tensors, from an implementation for CPU tensors or from other operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Registrations live as long as their library object.
_libraries: list[torch.library.Library] = []
_names: set[str] = set()


def emulate(name: str, implementation: Callable[..., Any]) -> None:
    """Gives the operator ``name`` a CPU kernel, and makes NPU tensors use it.

    The name is the full one: ``atb::_npu_rotary_embedding``, with ``.overload`` where there is one.

    The implementation gets the arguments of the schema, with CPU tensors on the NPU tensors' memory: writing into one
    writes the device's memory. What it returns comes back as NPU tensors; an argument it returns, as that argument.
    It is recorded and replayed in graphs like any device work.
    """
    namespace, rest = name.split("::")
    operator, _, overload = rest.partition(".")
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    library.impl(rest, implementation, "CPU")
    torch.ops.softnpu.use_cpu_kernel(f"{namespace}::{operator}", overload)
    _names.add(name)


def compose(name: str, implementation: Callable[..., Any]) -> None:
    """Gives the operator ``name`` a kernel for NPU tensors that calls other operators with them.

    The operator may be defined later, by the library that has it.
    """
    namespace, rest = name.split("::")
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    library.impl(rest, implementation, "PrivateUse1")
    _names.add(name)


def emulate_undefined(name: str, schema: str, implementation: Callable[..., Any]) -> None:
    """As :func:`emulate`, for an operator that the library which has it defines later.

    The work is done by an operator of our own with the same ``schema``, which starts at its parenthesis; arguments are
    passed on by position, and those after a star by name.
    """
    operator = name.split("::")[1]
    ours = torch.library.Library("softnpu", "FRAGMENT")
    _libraries.append(ours)
    ours.define(f"{operator}{schema}")
    emulate(f"softnpu::{operator}", implementation)
    compose(name, getattr(torch.ops.softnpu, operator).default)


def emulated() -> list[str]:
    """Full names of the operators that this process has given kernels, without those of our own namespace."""
    return sorted(name for name in _names if not name.startswith("softnpu::"))
