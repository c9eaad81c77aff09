"""The command line, and activation in processes that it starts."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from vllm_ascend_moe.softnpu.info import operators
from vllm_ascend_moe.softnpu.overrides import emulate as emulation
from vllm_ascend_moe.softnpu.overrides.emulate import compose, emulate, emulated
from vllm_ascend_moe.softnpu.settings import VARIABLES, environment, folders


def command(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "vllm_ascend_moe.softnpu", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("first", ["torch", "torch_npu"])
def test_whatever_is_imported_first(first):
    code = f"import {first}; import torch; print(torch.ones(2, device='npu').add(1).tolist())"
    clean = {"ASCEND_MOE_SOFTNPU": "", "LD_LIBRARY_PATH": "", "PYTHONPATH": ""}
    done = command("run", "--", sys.executable, "-c", code, **clean)
    assert done.stdout.strip().endswith("[2.0, 2.0]"), done.stderr


def test_nothing_is_loaded_where_it_is_not_on():
    code = "import torch, sys; print('torch_npu' in sys.modules)"
    clean = {**os.environ, "ASCEND_MOE_SOFTNPU": "", "LD_LIBRARY_PATH": "", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_mistakes_are_explained(tmp_path):
    assert "run needs a command" in command("run").stderr
    assert "cannot be run" in command("run", "--", str(tmp_path / "missing")).stderr
    missing = command("run", "--", "true", ASCEND_MOE_SOFTNPU_HOME=str(tmp_path))
    assert missing.returncode == 1
    assert "is missing: run `python -m vllm_ascend_moe.softnpu build`" in missing.stderr


def test_arguments_exit_codes_and_signals_are_passed_on(tmp_path):
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\necho "$1|$2"; exit 42\n')
    script.chmod(0o755)
    done = command("run", "--", os.path.relpath(script), "--info", "a b")
    assert (done.returncode, done.stdout) == (42, "--info|a b\n")
    assert command("run", "--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_info_into_a_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    called = [sys.executable, "-m", "vllm_ascend_moe.softnpu", "info"]
    done = subprocess.run(called, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_info_lists_what_is_emulated():
    done = command("info")
    assert (done.returncode, done.stderr) == (0, "")
    found = {}
    for kind, count, names in re.findall(r"^([^\n]+) \((\d+)\):\n((?:  [^\n]+\n)+)", done.stdout, re.MULTILINE):
        found[kind] = names.split()
        assert len(found[kind]) == int(count)
    assert {"aclnnRmsNorm", "aclnnMoeGatingTopK"} < set(found["aclnn functions"])
    assert set(found["aclnn functions"]) == set(operators(folders()))
    assert "atb::_npu_rotary_embedding" in found["operators of torch_npu over ATB, as a whole"]
    assert "atb::npu_paged_cache_load.out" in found["operators of torch_npu over ATB, as a whole"]
    assert "_C_ascend::npu_moe_init_routing_custom" in found["operators of vllm-ascend, as a whole"]
    whole = [name for kind, names in found.items() if kind.endswith("as a whole") for name in names]
    assert sorted(whole) == emulated()
    assert "Identity" in found["operators of the interface before aclnn"]
    assert "HcclAllGatherV" in found["HCCL"]
    assert "aclrtMalloc" in found["runtime"]
    # There to be linked against: it fails with its name.
    assert "aclrtBinaryGetFunction" not in found["runtime"]
    assert int(re.search(r"plain aten operators: (\d+)", done.stdout)[1]) > 1000
    assert all(name in done.stdout for name in VARIABLES)


def test_what_is_given_a_kernel_is_listed(monkeypatch):
    monkeypatch.setattr(emulation, "_names", {*emulated()})  # other tests compare the whole list
    with torch.library._scoped_library("softnpu_listed", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("later(Tensor x) -> Tensor")
        before = emulated()
        emulate("softnpu_listed::twice", lambda x: 2 * x)
        compose("softnpu_listed::later", lambda x: torch.ops.softnpu_listed.twice(x) + 1)
        assert sorted({*before, "softnpu_listed::later", "softnpu_listed::twice"}) == emulated()
        assert torch.ops.softnpu_listed.later(torch.ones(2, device="npu")).tolist() == [3, 3]


def test_environment_keeps_what_was_there():
    given = {"PYTHONPATH": "/mine", "LD_LIBRARY_PATH": "/libs", "OTHER": "x"}
    made = environment(folders(given), given)
    assert made["PYTHONPATH"].split(":")[1:] == ["/mine"]
    assert made["LD_LIBRARY_PATH"].split(":")[1:] == ["/libs"]
    assert made["OTHER"] == "x"
    assert environment(folders(given), made) == made  # again is the same
