"""How vLLM finds this plugin: which platform runs, what is registered, and that faults are visible.

Every case is a process of its own, since vLLM loads plugins and its platform once per process. Other plugins are real
distributions to Python: a folder with their entry points, put on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

_REPORT = """
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch
from vllm.model_executor.custom_op import op_registry_oot
print("platform", type(current_platform).__module__)
print("operators", hasattr(torch.ops.vllm, "maybe_pad_and_reduce"))
print("layers", sorted(op_registry_oot))
"""
_OURS = ["platform vllm_ascend_moe.integration.cpu_platform", "operators True"]
_STOCK = ["platform vllm.platforms.cpu", "operators False", "layers []"]


def run_python(code: str, path: Path | None = None, **env: str | None) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process; env values of None are removed, ``path`` is put first on its import path."""
    full = {**os.environ, **{name: value for name, value in env.items() if value is not None}}
    for name in [name for name, value in env.items() if value is None]:
        full.pop(name, None)
    if path is not None:
        full["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=120, check=False
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.split(" ")[0] in ("platform", "operators", "layers")]


def install(folder: Path, name: str, modules: dict[str, str], entry_points: str = "", version: str = "1.0") -> Path:
    """A distribution in a folder, as pip would lay it out."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, source in modules.items():
        target = folder / module
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source)
    return folder


_OTHER_PLATFORM = "from vllm.platforms.cpu import CpuPlatform\n\nclass OtherPlatform(CpuPlatform):\n    pass\n"


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [(None, _OURS), ("ascend_moe", _OURS), ("some_other_plugin", _STOCK), ("", _STOCK)],
    ids=["unset", "ours", "other", "empty"],
)
def test_vllm_plugins_decides(plugins: str | None, expected: list[str]) -> None:
    found = lines(run_python(_REPORT, VLLM_PLUGINS=plugins))
    assert found[: len(expected)] == expected
    if expected is _OURS:
        assert found[2] == "layers ['MoERunner', 'UnquantizedFusedMoEMethod']"


def test_switched_off_by_our_variable() -> None:
    assert lines(run_python(_REPORT, ASCEND_MOE_ENABLE="0")) == _STOCK


def test_a_bypassed_platform_is_reported() -> None:
    """VLLM_TARGET_DEVICE=cpu makes vLLM skip platform plugins; ours then says what will not work, and why."""
    done = run_python(_REPORT, VLLM_TARGET_DEVICE="cpu")
    assert lines(done) == ["platform vllm.platforms.cpu", "operators True", "layers []"]
    assert "VLLM_TARGET_DEVICE=cpu makes vLLM skip all platform plugins" in done.stdout + done.stderr


def test_registering_twice_is_harmless() -> None:
    code = (
        _REPORT + "from vllm_ascend_moe import register_ops\nregister_ops()\nregister_ops()\nprint('platform twice')\n"
    )
    assert lines(run_python(code))[-1] == "platform twice"


def test_another_out_of_tree_platform_is_named(tmp_path: Path) -> None:
    """vLLM accepts one out-of-tree platform: with two it stops, and says which."""
    install(
        tmp_path,
        "other-accelerator",
        {"other_accelerator.py": "def register():\n    return 'other_accelerator_platform.OtherPlatform'\n"},
        "[vllm.platform_plugins]\nother = other_accelerator:register\n",
    )
    done = run_python(_REPORT, tmp_path)
    assert done.returncode != 0
    assert "Only one platform plugin" in done.stderr
    assert "ascend_moe" in done.stderr
    assert "other" in done.stderr


def test_yields_to_vllm_ascend(tmp_path: Path) -> None:
    """With vllm-ascend installed its platform runs, and nothing of ours is registered. A stand-in package: it proves
    that we yield, not that vllm-ascend works."""
    install(
        tmp_path,
        "vllm-ascend",
        {
            "vllm_ascend/__init__.py": "def register():\n    return 'vllm_ascend.platform.OtherPlatform'\n",
            "vllm_ascend/platform.py": _OTHER_PLATFORM,
        },
        "[vllm.platform_plugins]\nascend = vllm_ascend:register\n",
    )
    found = lines(run_python(_REPORT, tmp_path))
    assert found == ["platform vllm_ascend.platform", "operators False", "layers []"]


def test_unsupported_vllm_is_an_error_that_shows(tmp_path: Path) -> None:
    """vLLM swallows errors of platform detection, so ours is logged; the general plugin's error stops the process."""
    install(tmp_path, "vllm", {}, version="0.20.0+cpu")
    done = run_python(_REPORT, tmp_path)
    assert done.returncode != 0
    assert "vllm-ascend-moe is not active" in done.stderr + done.stdout
    assert "MissingDependencyError" in done.stderr
    assert "0.20.0+cpu is installed, but vllm-ascend-moe needs 0.30 to 0.33" in done.stderr


def test_layer_replaced_by_another_plugin_is_an_error_that_shows() -> None:
    code = (
        "from vllm.model_executor.custom_op import PluggableLayer\n"
        "from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner\n"
        "PluggableLayer.register_oot(type('Other', (MoERunner,), {}), name='MoERunner')\n"
    ) + _REPORT
    done = run_python(code)
    assert done.returncode != 0
    assert "has replaced vLLM's MoERunner" in done.stderr


_CONFIG = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
try:
    EngineArgs(model=sys.argv[1] if len(sys.argv) > 1 else MODEL, additional_config=SECTION).create_engine_config()
except Exception as error:
    print("platform", type(error).__name__, str(error).replace("\\n", " "))
else:
    print("platform accepted")
"""


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"ascend_moe": {"comm": "padded_allgather", "experts": "reference"}}, ["accepted"]),
        ({"ascend_moe": {"comms": "auto"}}, ["additional_config.ascend_moe.comms", "'auto'", "known keys are comm"]),
        ({"ascend_moe": {"comm": "fastest"}}, ["additional_config.ascend_moe.comm", "'fastest'", "padded_allgather"]),
    ],
    ids=["good", "unknown-key", "wrong-value"],
)
def test_configuration_is_checked_at_start(section: dict[str, object], expected: list[str], tmp_path: Path) -> None:
    """Through vLLM's own arguments: an engine with a wrong section does not start."""
    from vllm_ascend_moe.testing.tiny_models import make_tiny_model

    model = make_tiny_model("mixtral", tmp_path / "model")
    [line] = lines(run_python(f"MODEL = {str(model)!r}\nSECTION = {section!r}\n" + _CONFIG))
    for part in expected:
        assert part in line
