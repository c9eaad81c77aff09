"""The import layers: the package keeps them, and the check finds each kind of planted fault.

Proves what static imports say; an import by a computed name would not be found.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_layers.py"


def load():
    spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_layers"] = module
    spec.loader.exec_module(module)
    return module


check_layers = load()


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture
def package(tmp_path):
    """A copy of our package, to plant faults in."""
    copy = tmp_path / "vllm_ascend_moe"
    shutil.copytree(ROOT / "vllm_ascend_moe", copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def test_the_package_keeps_its_layers():
    result = run()
    assert (result.returncode, result.stdout) == (0, "")


PLANTED = [
    ("layout.py", "from vllm_ascend_moe.ops.native import pad_rows", "layout may import only envs, errors"),
    ("layout.py", "from vllm_ascend_moe import ops", "not ops"),
    ("layout.py", "from .ops import native", "not ops"),
    ("ops/native.py", "from ..comm.base import Dispatched", "not comm"),
    ("ops/native.py", "from .. import comm", "not comm"),
    ("ops/native.py", "import vllm_ascend_moe.experts.base", "not experts"),
    ("ops/native.py", "def late():\n    import vllm", "vllm may be imported only in integration"),
    ("comm/base.py", "from vllm.distributed import get_ep_group", "vllm may be imported only in"),
    ("comm/base.py", "import importlib\nimportlib.import_module('vllm.envs')", "vllm may be imported only in"),
    ("comm/base.py", "from vllm_ascend_moe.experts.base import ExpertWeights", "not experts"),
    ("comm/base.py", "import numpy as np", "numpy may be imported only in"),
    ("comm/base.py", "import scipy", "scipy is no declared dependency"),
    ("experts/base.py", "import triton", "triton may be imported only in"),
    ("experts/base.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm", "vllm may be"),
    ("experts/base.py", "from vllm_ascend_moe.integration import register", "not integration"),
    ("errors.py", "import torch", "torch may be imported only in"),
    ("envs.py", "from vllm_ascend_moe.layout import TokenLayout", "envs may import only errors"),
    ("platform.py", "from vllm_ascend_moe.integration import register", "platform may import only envs, errors"),
    ("testing/data.py", "from vllm_ascend_moe.tools.cli import main", "not tools"),
    ("__init__.py", "import os", "importing the package must import nothing"),
    ("__init__.py", "from vllm_ascend_moe.errors import LayoutError", "__init__ may import only integration, platform"),
]


@pytest.mark.parametrize(("file", "code", "rule"), PLANTED, ids=[f"{file}: {code}" for file, code, _ in PLANTED])
def test_a_planted_fault_is_found_with_its_line_and_rule(package, file, code, rule):
    path = package / file
    clean = run(package).stdout.splitlines()  # a fault of the package itself is another test's
    before = path.read_text()
    path.write_text(f"{before}\n{code}\n")
    line = len(f"{before}\n{code}".splitlines())
    result = run(package)
    assert result.returncode == 1
    found = [fault for fault in result.stdout.splitlines() if rule in fault and fault not in clean]
    assert [fault.rsplit(":", 2)[:2] for fault in found] == [[str(path), str(line)]]


def test_a_file_outside_the_layers_is_a_fault(package):
    (package / "helpers.py").write_text("")
    assert "helpers is in no import layer" in run(package).stdout


def test_allowed_imports_are_no_faults(package):
    clean = run(package).stdout
    for file, code in [
        ("ops/register_custom_ops.py", "import vllm"),
        ("integration/extra.py", "import vllm\nfrom vllm_ascend_moe.platform import choose_platform"),
        ("kernels/extra.py", "import triton, torch"),
        ("comm/extra.py", "from vllm_ascend_moe.layout import TokenLayout\nimport torch, functools"),
        ("tools/extra.py", "from vllm_ascend_moe import __version__, testing, platform"),
        ("experts/extra.py", "import vllm_ascend_moe._native"),
    ]:
        with (package / file).open("a") as stream:
            stream.write(f"\n{code}\n")
    assert run(package).stdout == clean


def test_a_wrong_folder_is_an_error_and_not_a_pass(tmp_path):
    assert run(tmp_path).returncode == 2


def test_layers_go_one_way():
    """No layer imports, over any number of steps, a layer that imports it."""
    layers = check_layers.LAYERS

    def below(layer, seen=()):
        assert layer not in seen, [*seen, layer]
        for lower in layers[layer]:
            below(lower, (*seen, layer))

    for layer in layers:
        below(layer)


def test_the_docstring_of_the_package_names_every_layer_and_who_imports_vllm():
    import vllm_ascend_moe

    text = vllm_ascend_moe.__doc__
    for layer in set(check_layers.LAYERS) - {"__init__", "__main__"}:
        assert layer in text
    for place in check_layers.OUTSIDE["vllm"]:
        assert place in text


def test_importing_the_package_imports_neither_torch_nor_vllm():
    code = "import sys, vllm_ascend_moe; print(sorted({'torch', 'vllm', 'triton', 'pydantic'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module",
    ["layout", "ops.native", "ops.forward_layouts", "comm.padded_all_gather", "experts.reference", "testing.launch"],
)
def test_modules_that_need_torch_alone_load_without_vllm(module):
    """As on a machine without vLLM: an attempt to import it fails."""
    code = f"import sys; sys.modules['vllm'] = None; import vllm_ascend_moe.{module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
