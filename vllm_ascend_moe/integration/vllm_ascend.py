"""Beside vllm-ascend: replaces its two operators and what reads their results by the padded forms.

vllm-ascend keeps its platform, its layers and its kernels. Only versions whose code was read are touched; on any other
this does nothing and says so.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from vllm_ascend_moe import envs
from vllm_ascend_moe.platform import logger, vllm_version

# These two releases have the same code in every function that is replaced.
KNOWN_VLLM_ASCEND = ("0.23.0", "0.23.0.post1")
KNOWN_VLLM = ("0.23.0",)
# Atlas A2 and A3, whose routing operator keeps ids outside of the rank's range out (read in its source).
KNOWN_DEVICES = ("A2", "A3")

# Importing it registers vllm-ascend's operators.
_OPERATORS = "vllm_ascend.ops"
_RUNNER = "vllm_ascend.worker.model_runner_v1"
_DISPATCH_KEYS = ("PrivateUse1", "CPU", "CUDA")
# Registrations live as long as their Library objects.
_libraries: list[Any] = []
_runners: list[type] = []


def register() -> None:
    """Replaces the operators now, or as soon as vllm-ascend registers them. Harmless when called again.

    In a process that never imports them, such as the API server, nothing is imported and nothing happens.
    """
    if not envs.get("ASCEND_MOE_VLLM_ASCEND"):
        logger.info("ASCEND_MOE_VLLM_ASCEND=0: vllm-ascend runs with its own operators.")
        return
    unknown = _unknown_version()
    if unknown:
        logger.warning(
            "vllm-ascend-moe does nothing: %s. Its padded operators were made for vllm-ascend %s on vLLM %s.",
            unknown,
            " and ".join(KNOWN_VLLM_ASCEND),
            " and ".join(KNOWN_VLLM),
        )
        return
    _when_imported(_OPERATORS, install)
    _when_imported(_RUNNER, install_counts)


def _when_imported(module: str, then: Callable[[], None]) -> None:
    if module in sys.modules:
        then()
    elif not any(isinstance(finder, _AfterImport) and finder.then is then for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(module, then))


def _unknown_version() -> str | None:
    _, vllm = vllm_version()
    try:
        ascend = version("vllm-ascend")
    except PackageNotFoundError:
        return "the version of vllm-ascend is unknown, since it is not installed as a distribution"
    if ascend not in KNOWN_VLLM_ASCEND:
        return f"vllm-ascend {ascend} is installed"
    if vllm.partition("+")[0] not in KNOWN_VLLM:
        return f"vLLM {vllm} is installed"
    return None


class _AfterImport(MetaPathFinder):
    """Calls ``then`` once, when the module ``name`` has been imported by whoever needs it."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self.then, self._looking = name, then, False

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Replaces vllm-ascend's implementations, fakes and readers by the padded ones, once per process.

    Logs what it replaced. On a device it does not know, or where vllm-ascend's functions are not the known ones, it
    warns and replaces nothing.
    """
    if _libraries:
        return
    import torch
    from vllm_ascend.utils import get_ascend_device_type

    from vllm_ascend_moe.integration import vllm_ascend_padded as padded

    device = get_ascend_device_type().name
    if device not in KNOWN_DEVICES:
        logger.warning("vllm-ascend-moe does nothing on device type %s: it knows %s.", device, KNOWN_DEVICES)
        return
    replaced = _replacements(padded)
    for owner, name, ours in replaced:
        theirs = _parameters(getattr(owner, name))
        if theirs != _parameters(ours):
            logger.warning("vllm-ascend-moe does nothing: %s has parameters %s, not the known ones.", name, theirs)
            return
    for owner, name, ours in replaced:
        setattr(owner, name, ours)
    library = torch.library.Library("vllm", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns of a kernel that replaces another, which is what this does.
        warnings.simplefilter("ignore", UserWarning)
        _register(library, padded)
    _libraries.append(library)
    logger.info(
        "vllm-ascend-moe keeps MoE tokens in the padded layout: replaced in vllm-ascend %s: %s.",
        version("vllm-ascend"),
        ", ".join(name for _, name, _ in replaced),
    )


def install_counts() -> None:
    """Keeps the true token counts of the DP ranks, once per process, so that pad rows can be told from tokens."""
    from vllm_ascend_moe.integration.vllm_ascend_counts import keep_counts

    runner = sys.modules[_RUNNER].NPUModelRunner
    if runner not in _runners:
        _runners.append(runner)
        keep_counts(runner)


def _register(library: Any, padded: ModuleType) -> None:
    """Gives both operators our kernels, under the keys under which vllm-ascend has given them its own."""
    import torch

    for name, real, fake in (
        ("maybe_all_gather_and_maybe_unpad", padded.gather, padded.gather_fake),
        ("maybe_pad_and_reduce", padded.reduce, padded.reduce_fake),
    ):
        for key in _DISPATCH_KEYS:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"vllm::{name}", key):
                library.impl(name, real, key)
        library._register_fake(name, fake)


def _replacements(padded: ModuleType) -> list[tuple[Any, str, Callable[..., Any]]]:
    """(where, name, our function) of everything that is replaced, each exactly where it is looked up."""
    from vllm_ascend.ops.fused_moe import prepare_finalize

    ops, strategy = padded.their_ops, padded.PrepareAndFinalizeWithAllGather
    return [
        (ops, "_maybe_all_gather_and_maybe_unpad_impl", padded.gather),
        (ops, "_maybe_all_gather_and_maybe_unpad_fake", padded.gather_fake),
        (ops, "_maybe_pad_and_reduce_impl", padded.reduce),
        (ops, "_maybe_pad_and_reduce_fake", padded.reduce_fake),
        (padded.their_utils, "fc3_all_gather_and_maybe_unpad_impl", padded.fc3_gather),
        (prepare_finalize, "fc3_all_gather_and_maybe_unpad_impl", padded.fc3_gather),
        (padded.TokenDispatcherWithAllGather, "token_dispatch", padded.token_dispatch),
        (strategy, "_prepare_with_ep_group", padded.prepare),
        (strategy, "_finalize_with_ep_group", padded.finalize),
        (strategy, "all_gather_input_id_with_dp_group", padded.gather_input_ids),
        (padded.RoutedExpertsCapturer, "capture", padded.capture),
    ]


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
