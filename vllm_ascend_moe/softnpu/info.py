"""What is emulated, read from the built libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path

from vllm_ascend_moe.softnpu.errors import SoftNPUError
from vllm_ascend_moe.softnpu.settings import VARIABLES, Folders

_SUFFIX = "GetWorkspaceSize"


def defined(library: Path) -> set[str]:
    """Names of the functions that a shared library defines."""
    if not library.is_file():
        raise SoftNPUError(f"{library} is missing: run `python -m vllm_ascend_moe.softnpu build`")
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--format=posix", str(library)],
        check=True,
        capture_output=True,
        text=True,
    )
    return {line.split()[0] for line in listed.stdout.splitlines() if line}


def operators(where: Folders) -> list[str]:
    """Names of the emulated aclnn functions."""
    names = defined(where.lib / "libopapi.so")
    return sorted(name for name in names if name.startswith("aclnn") and f"{name}{_SUFFIX}" in names)


def report(where: Folders) -> str:
    """The text of ``info``."""
    runtime = sorted(n for n in defined(where.lib / "libascendcl.so") if n.startswith("acl"))
    hccl = sorted(n for n in defined(where.lib / "libhccl.so") if n.startswith("Hccl"))
    aclnn = operators(where)
    parts = [
        f"libraries: {where.lib}",
        f"torch_npu: {where.torch_npu}",
        "",
        f"aclnn functions ({len(aclnn)}):",
        *(f"  {name}" for name in aclnn),
        "",
        f"HCCL ({len(hccl)}): {' '.join(hccl)}",
        "",
        f"runtime ({len(runtime)}): {' '.join(runtime)}",
        "",
        "aten operators: all that have a CPU kernel",
        "",
        "environment:",
        *(f"  {name:<28} {text}" for name, text in VARIABLES.items()),
    ]
    return "\n".join(parts)
