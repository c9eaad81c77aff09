"""Contract tests: what an emulated operator returns, against what torch_npu's own host code says it returns.

The oracle is a second process in which every aclnn function exists and does nothing, and no operator is overridden.
Real host code infers shapes and types there, allots outputs and checks arguments; values mean nothing.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from vllm_ascend_moe.softnpu.errors import ContractError, SoftNPUError
from vllm_ascend_moe.softnpu.settings import environment, folders

_TIMEOUT_S = 120.0
_oracles: list[_Oracle] = []


@dataclass(frozen=True)
class _Sent:
    """A tensor on its way to the oracle."""

    on_npu: bool
    tensor: torch.Tensor


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return value


def _operator(name: str) -> Callable[..., Any]:
    """The operator of a name such as ``npu::npu_rms_norm`` or ``npu::npu_max.dim``."""
    namespace, rest = name.split("::")
    operator, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def _signature(result: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of every tensor in a result, in order."""
    found: list[tuple[tuple[int, ...], torch.dtype]] = []
    _map(result, lambda t: found.append((tuple(t.shape), t.dtype)))
    return found


class _Oracle:
    """The oracle's process: takes calls with CPU tensors, answers with signatures or error texts."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
            env=environment(folders(), oracle=True),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.close)

    def ask(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
        self._connection.send_bytes(pickle.dumps((name, args, kwargs)))
        if not self._connection.poll(_TIMEOUT_S):
            raise SoftNPUError(f"the oracle did not answer within {_TIMEOUT_S:.0f} s about {name}")
        answer: tuple[str, Any] = pickle.loads(self._connection.recv_bytes())
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


def expected(name: str, *args: Any, **kwargs: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of every tensor that the operator ``name`` returns, by torch_npu's host code.

    Raises:
        RuntimeError: torch_npu refuses the call; its own text.
    """
    if not _oracles:
        _oracles.append(_Oracle())
    on_cpu = _map((args, kwargs), lambda t: _Sent(t.device.type == "npu", t.cpu()))
    kind, answer = _oracles[0].ask(name, *on_cpu)
    if kind == "error":
        raise RuntimeError(answer)
    return answer


def contract(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the operator ``name`` on the soft NPU and checks the shapes and types of what it returns.

    Args:
        name: such as ``npu::npu_rms_norm``.
        args, kwargs: its arguments, with NPU tensors.

    Returns:
        What the emulated operator returned.

    Raises:
        ContractError: it differs from what torch_npu's host code says.
    """
    wanted = expected(name, *args, **kwargs)
    result = _operator(name)(*args, **kwargs)
    given = _signature(result)
    if given != wanted:
        raise ContractError(f"{name} returns {given}; torch_npu's host code says {wanted}")
    return result


def _restore(value: Any) -> Any:
    """Undoes what ``expected`` did to the arguments: tensors that were on the NPU go back there."""
    if isinstance(value, _Sent):
        return value.tensor.to("npu") if value.on_npu else value.tensor
    if isinstance(value, (tuple, list)):
        return type(value)(_restore(item) for item in value)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    return value


def serve(file: int) -> None:
    """The oracle's process: answers calls that come through the pipe ``file`` until it is closed."""
    connection = Connection(file)
    while True:
        try:
            name, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = ("signature", _signature(_operator(name)(*_restore(args), **_restore(kwargs))))
        except Exception as error:  # noqa: BLE001  whatever torch_npu says of the call is the answer
            answer = ("error", str(error))
        connection.send_bytes(pickle.dumps(answer))
