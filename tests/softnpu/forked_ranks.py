"""Ranks forked from a process that has imported torch and torch_npu, and used no device: importing them takes three
seconds a rank otherwise, most of the time of these tests.

A rank is what it is when it is spawned: the same modules, the caller's environment and path, no state of a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import vllm_ascend_moe.testing.launch as launch


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


class _Environment:
    """Arrives as the sender's environment, set. The process that ranks are forked from may have another."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[dict[str, str]]]:
        return _set_environment, (dict(os.environ),)


def _start(environment: None, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the rank. The environment comes first: what is unpickled after it imports modules, which may look at it."""
    target(*args)


class _Context(ForkServerContext):
    def Process(self, *, target: Callable[..., Any], args: tuple[Any, ...], daemon: bool) -> ForkServerProcess:
        return ForkServerProcess(target=_start, args=(_Environment(), target, args), daemon=daemon)


class _Multiprocessing:
    """What ``launch`` uses of torch.multiprocessing."""

    def __init__(self) -> None:
        self.context = _Context()
        self.context.set_forkserver_preload(["torch", "vllm_ascend_moe.testing.launch"])

    def get_context(self, method: str) -> _Context:
        assert method == "spawn", f"launch wants {method}"
        return self.context


def install() -> None:
    """Makes ``launch`` start its ranks so."""
    launch.mp = _Multiprocessing()
