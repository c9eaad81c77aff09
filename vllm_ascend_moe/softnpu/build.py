"""Builds the libraries with make and the C++ compiler."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from vllm_ascend_moe.softnpu.errors import SoftNPUError
from vllm_ascend_moe.softnpu.settings import REPOSITORY, Folders

REQUIREMENTS = REPOSITORY / "requirements" / "softnpu.txt"


def torch_folder() -> Path:
    """The folder of the torch package, found without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SoftNPUError("torch is not installed for this Python: install torch 2.13 first")
    return Path(spec.origin).parent


def install_torch_npu(where: Folders) -> None:
    """Installs torch-npu, without what it depends on, into its own folder, unless it is there."""
    if where.torch_npu.is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", str(where.site), "-r", str(REQUIREMENTS)], check=False)
    if done.returncode != 0:
        raise SoftNPUError(f"torch-npu could not be installed into {where.site}; see pip's message above")


def build(where: Folders) -> None:
    """Builds what has changed.

    Raises:
        SoftNPUError: no sources, no make, no compiler, or a compiler error (shown above the message).
    """
    if not (where.source / "Makefile").is_file():
        raise SoftNPUError(f"no C++ sources in {where.source}: build from a source tree of vllm-ascend-moe")
    if shutil.which("make") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        raise SoftNPUError("make and a C++ compiler are needed to build the soft NPU")
    install_torch_npu(where)
    headers = sysconfig.get_path("include")
    variables = [f"TORCH={torch_folder()}", f"NPU={where.torch_npu}", f"OUT={where.home}", f"PYTHON={headers}"]
    # --keep-going: one file that does not compile leaves the other libraries usable.
    options = [f"-j{min(os.cpu_count() or 1, 8)}", "--no-print-directory", "--keep-going"]
    command = ["make", *options, "-f", str(where.source / "Makefile"), *variables]
    where.home.mkdir(parents=True, exist_ok=True)
    with (where.home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build at the same time would write the same files
        done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise SoftNPUError("the soft NPU was not built; see the messages above")
