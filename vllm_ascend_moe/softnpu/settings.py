"""Folders of the soft NPU, and the environment of a program that runs on it.

The variables that the libraries themselves read are listed in ``VARIABLES``; ``csrc/softnpu/runtime/settings.cpp``
parses them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLES: dict[str, str] = {
    "ASCEND_MOE_SOFTNPU": "1: on. Set by `run`",
    "ASCEND_MOE_SOFTNPU_ORACLE": "1: aclnn functions do nothing. Set by contract tests",
    "ASCEND_MOE_SOFTNPU_SOC": "A2 (default: Ascend910B2), A3 (Ascend910_9391) or a SoC's full name",
    "ASCEND_MOE_SOFTNPU_DEVICES": "number of devices (default 8)",
    "ASCEND_MOE_SOFTNPU_MEMORY": "memory of each device (default 4G); host memory is used only where it is written",
    "ASCEND_MOE_SOFTNPU_TIMEOUT": "seconds until a collective gives up on a missing rank (default 120)",
    "ASCEND_MOE_SOFTNPU_POISON": "0: outputs do not start as NaN (default 1)",
    "ASCEND_MOE_SOFTNPU_FAULTS": "faults on demand, such as collective_fail@3:rank=1,oom@10",
    "ASCEND_MOE_SOFTNPU_HOME": "folder of the built libraries (default: build/softnpu of the source tree)",
    "ASCEND_MOE_SOFTNPU_SITE": "folder that torch-npu was installed into (default: .venv/softnpu-site there)",
}

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Folders:
    """Where the parts are.

    Attributes:
        source: the C++ sources, ``csrc/softnpu``.
        home: build output; ``lib`` in it has the libraries.
        site: holds the ``torch_npu`` package and nothing that the main environment should see.
    """

    source: Path
    home: Path
    site: Path

    @property
    def lib(self) -> Path:
        return self.home / "lib"

    @property
    def oracle(self) -> Path:
        """Holds the libopapi whose functions do nothing; see ``contract.py``."""
        return self.home / "oracle"

    @property
    def torch_npu(self) -> Path:
        return self.site / "torch_npu"


def folders(environ: Mapping[str, str] = os.environ) -> Folders:
    """The folders that ``environ`` names, or those of the source tree."""
    return Folders(
        source=REPOSITORY / "csrc" / "softnpu",
        home=Path(environ.get("ASCEND_MOE_SOFTNPU_HOME") or REPOSITORY / "build" / "softnpu"),
        site=Path(environ.get("ASCEND_MOE_SOFTNPU_SITE") or REPOSITORY / ".venv" / "softnpu-site"),
    )


def is_oracle(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started with ``environment(..., oracle=True)``."""
    return environ.get("ASCEND_MOE_SOFTNPU_ORACLE") == "1"


def _prepend(environ: Mapping[str, str], name: str, entry: Path) -> str:
    rest = [part for part in environ.get(name, "").split(os.pathsep) if part and part != str(entry)]
    return os.pathsep.join([str(entry), *rest])


def environment(where: Folders, environ: Mapping[str, str] = os.environ, oracle: bool = False) -> dict[str, str]:
    """``environ`` with what a program needs to run on the soft NPU.

    Args:
        where: the folders.
        environ: the environment to start from.
        oracle: aclnn functions do nothing and no operator is overridden: for contract tests.
    """
    libraries = _prepend(environ, "LD_LIBRARY_PATH", where.lib)
    if oracle:
        libraries = _prepend({"LD_LIBRARY_PATH": libraries}, "LD_LIBRARY_PATH", where.oracle)
    return {
        **environ,
        "ASCEND_MOE_SOFTNPU": "1",
        "ASCEND_MOE_SOFTNPU_ORACLE": "1" if oracle else "0",
        "PYTHONPATH": _prepend(environ, "PYTHONPATH", where.site),
        "LD_LIBRARY_PATH": libraries,
        # A second thread would run the collectives and leave their order to chance.
        "TASK_QUEUE_ENABLE": "0",
    }
