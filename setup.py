"""Build script: metadata lives in pyproject.toml; this file adds the entry points vLLM and the shell look for."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["vllm_ascend_moe", "vllm_ascend_moe.*"]),
    package_data={"vllm_ascend_moe": ["py.typed"]},
    entry_points={
        "vllm.platform_plugins": ["ascend_moe = vllm_ascend_moe:register_platform"],
        "vllm.general_plugins": ["ascend_moe = vllm_ascend_moe:register_ops"],
        "console_scripts": ["vllm-ascend-moe = vllm_ascend_moe.tools.cli:main"],
    },
)
