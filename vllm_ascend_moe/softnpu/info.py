"""What is emulated: asked of the built libraries, and of a process that runs on them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_ascend_moe.softnpu.errors import SoftNPUError
from vllm_ascend_moe.softnpu.settings import VARIABLES, Folders, environment

_SUFFIX = "GetWorkspaceSize"
# Functions that are there to be linked against, and fail, have a second symbol with this before their name.
_FAILS = "softnpu_not_emulated_"
_NAMESPACES = {
    "atb": "operators of torch_npu over ATB, as a whole",
    "_C_ascend": "operators of vllm-ascend, as a whole",
}
_WIDTH = 120


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


def functions(library: Path, *prefixes: str) -> list[str]:
    """Functions with these prefixes that a library emulates: without those that only fail with their name."""
    names = defined(library)
    return sorted(n for n in names if n.startswith(prefixes) and f"{_FAILS}{n}" not in names)


def operators(where: Folders) -> list[str]:
    """Names of the emulated aclnn functions."""
    names = functions(where.lib / "libopapi.so", "aclnn")
    return [name for name in names if f"{name}{_SUFFIX}" in names]


def print_inventory() -> None:
    """For the process that :func:`inventory` starts: prints as JSON what the dispatcher was given."""
    import torch

    from vllm_ascend_moe.softnpu.overrides.emulate import emulated

    ours = torch.ops.softnpu
    found = {"whole": emulated(), "aclop": ours.emulated_aclops().split(), "plain": ours.plain_operators()}
    print(json.dumps(found))


def inventory(where: Folders) -> dict[str, Any]:
    """What a process on the soft NPU has for the dispatcher.

    Returns:
        ``whole``: full names of operators that are replaced as a whole; ``aclop``: operators of the interface before
        aclnn; ``plain``: the number of aten operators that run ATen's CPU kernel.

    Raises:
        SoftNPUError: no such process can be started.
    """
    command = [sys.executable, "-c", f"from {__name__} import print_inventory; import torch; print_inventory()"]
    done = subprocess.run(command, env=environment(where), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SoftNPUError(f"the soft NPU does not start:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def groups(where: Folders) -> dict[str, list[str]]:
    """Everything that is emulated and has a name, by kind."""
    found = inventory(where)
    kinds = {"aclnn functions": operators(where)}
    for name in found["whole"]:
        namespace = name.split("::")[0]
        kinds.setdefault(_NAMESPACES.get(namespace, f"operators of {namespace}, as a whole"), []).append(name)
    kinds["operators of the interface before aclnn"] = found["aclop"]
    kinds["HCCL"] = functions(where.lib / "libhccl.so", "Hccl")
    kinds["runtime"] = functions(where.lib / "libascendcl.so", "acl", "rt", "Msprof")
    kinds[f"plain aten operators: {found['plain']}, those that have a CPU kernel"] = []
    return kinds


def _lines(names: list[str]) -> list[str]:
    """Names side by side, indented."""
    lines = [" "]
    for name in names:
        if len(lines[-1]) + 1 + len(name) > _WIDTH:
            lines.append(" ")
        lines[-1] += f" {name}"
    return lines


def report(where: Folders) -> str:
    """The text of ``info``."""
    parts = [f"libraries: {where.lib}", f"torch_npu: {where.torch_npu}"]
    for kind, names in groups(where).items():
        parts += ["", f"{kind} ({len(names)}):", *_lines(names)] if names else ["", kind]
    parts += ["", "environment:", *(f"  {name:<28} {text}" for name, text in VARIABLES.items())]
    return "\n".join(parts)
