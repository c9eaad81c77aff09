"""A pytest plugin for vllm-ascend's golden tests, in place of its conftest files, which want more packages.

As its conftest of these tests does, it defines the ``_C_ascend`` operators.
"""

from __future__ import annotations


def pytest_configure() -> None:
    from vllm_ascend.utils import enable_custom_op

    assert enable_custom_op(), "the operators are not defined: see scripts/vllm_ascend_site.py"
