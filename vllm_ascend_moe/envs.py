"""Every ``ASCEND_MOE_`` variable that the plugin reads at run time, typed, in one table; nothing else reads them.

(setup.py has one more, ``ASCEND_MOE_BUILD``, and the soft NPU, which stands alone, those in ``softnpu/settings.py``;
``comm/mc2_limits.py`` reads ``HCCL_BUFFSIZE``, as HCCL does. Variables of vLLM and PyTorch are set where processes are
started: ``integration/cpu_binding.py``, ``integration/generate.py``, ``testing/launch.py``.)

Names begin with ``ASCEND_MOE_``: vLLM rejects unknown names that begin with ``VLLM_``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ascend_moe.errors import ConfigError


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(name, text, "0 or 1", f"Set {name}=1 to switch it on, {name}=0 to switch it off.")
    return text == "1"


def _text(name: str, text: str) -> str:
    return text


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: its default (as text), how it is read, and what it does."""

    default: str
    parse: Callable[[str, str], Any]
    help: str


TABLE: dict[str, EnvVar] = {
    "ASCEND_MOE_ENABLE": EnvVar("1", _switch, "0 switches the plugin off: stock vLLM runs, our platform yields."),
    "ASCEND_MOE_TRACE": EnvVar("", _text, "Folder for one JSON line per MoE layer and step (layout, collectives)."),
    "ASCEND_MOE_VLLM_ASCEND": EnvVar("1", _switch, "0 leaves vllm-ascend's own operators in place where it runs."),
}


def get(name: str) -> Any:
    """Reads one variable of the table, now (not cached, so tests and spawned workers see changes).

    Raises:
        ConfigError: the text is not one the variable accepts.
        KeyError: ``name`` is not in the table.
    """
    var = TABLE[name]
    return var.parse(name, os.environ.get(name, var.default))
