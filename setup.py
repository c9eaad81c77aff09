"""Build script: metadata lives in pyproject.toml; this file adds the entry points vLLM and the shell look for, and the
native extension.

The extension is optional: it is built where torch can be imported (``pip install --no-build-isolation``) and a C++
compiler is found. Without it the package runs in plain torch and logs that at first use. Where it is tried, a failure
stops the installation; ``ASCEND_MOE_BUILD=0`` skips it and ``ASCEND_MOE_BUILD=1`` insists on it.
"""

import logging
import os
import shutil
from glob import glob
from typing import Any

from setuptools import find_packages, setup

logger = logging.getLogger(__name__)
SWITCH = os.environ.get("ASCEND_MOE_BUILD", "auto")


def skip(reason: str) -> dict[str, Any]:
    if SWITCH == "1":
        raise SystemExit(f"ASCEND_MOE_BUILD=1, but the native extension cannot be built: {reason}")
    logger.warning("native extension not built (%s): vllm-ascend-moe will run in plain torch", reason)
    return {}


def extension() -> dict[str, Any]:
    """Arguments of ``setup`` that build ``vllm_ascend_moe._native``, or none where it cannot or shall not be built."""
    if SWITCH == "0":
        return skip("ASCEND_MOE_BUILD=0")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, get_cxx_compiler
    except ImportError as error:
        return skip(f"torch cannot be imported here: {error}")
    if shutil.which(get_cxx_compiler()) is None:
        return skip(f"no C++ compiler: {get_cxx_compiler()}")
    native = CppExtension(
        "vllm_ascend_moe._native",
        sorted(glob("csrc/*.cpp") + glob("csrc/ops/*.cpp") + glob("csrc/cpu/*.cpp")),
        include_dirs=[os.path.abspath("csrc")],
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        extra_compile_args=["-O3", "-std=c++20", "-Wall", "-fvisibility=hidden", "-fopenmp"],
        extra_link_args=["-fopenmp"],
    )
    return {"ext_modules": [native], "cmdclass": {"build_ext": BuildExtension}}


setup(
    packages=find_packages(include=["vllm_ascend_moe", "vllm_ascend_moe.*"]),
    package_data={"vllm_ascend_moe": ["py.typed"]},
    entry_points={
        "vllm.platform_plugins": ["ascend_moe = vllm_ascend_moe:register_platform"],
        "vllm.general_plugins": ["ascend_moe = vllm_ascend_moe:register_ops"],
        "torch.backends": ["ascend_moe_softnpu = vllm_ascend_moe.softnpu:autoload"],
        "console_scripts": ["vllm-ascend-moe = vllm_ascend_moe.tools.cli:main"],
    },
    **extension(),
)
