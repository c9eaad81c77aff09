"""Operators emulated where the dispatcher calls them, and the counts of host work."""

import pytest
import torch
import torch_npu

from vllm_ascend_moe.softnpu.counts import counts, reset_counts
from vllm_ascend_moe.softnpu.overrides import emulate as emulation
from vllm_ascend_moe.softnpu.overrides.emulate import emulate, emulated


def scaled_sum(a, b, scale):
    a.add_(b, alpha=scale)
    return a, a[0], b + 1


@pytest.fixture(scope="module", autouse=True)
def operator():
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("softnpu_test", "DEF") as library:
        patch.setattr(emulation, "_names", {*emulated()})  # test_command.py compares the whole list
        library.define("scaled_sum(Tensor(a!) a, Tensor b, float scale) -> (Tensor(a!), Tensor(a), Tensor)")
        library.define("never_emulated(Tensor a) -> Tensor")
        emulate("softnpu_test::scaled_sum", scaled_sum)
        yield


def test_arguments_and_results():
    a, b = torch.ones(2, 3, device="npu"), torch.ones(2, 3, device="npu")
    same, view, new = torch.ops.softnpu_test.scaled_sum(a, b, 2.0)
    assert same is a
    view.zero_()
    assert a.tolist() == [[0, 0, 0], [3, 3, 3]]
    assert new.device == a.device
    assert new.tolist() == [[2, 2, 2]] * 2


def test_it_is_recorded_in_graphs():
    a, b = torch.zeros(2, device="npu"), torch.ones(2, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        _, _, new = torch.ops.softnpu_test.scaled_sum(a, b, 2.0)
    assert a.tolist() == [0, 0]
    b.fill_(5)
    graph.replay()
    graph.replay()
    assert a.tolist() == [20, 20]
    assert new.tolist() == [6, 6]


def test_an_operator_that_is_not_emulated_fails_with_its_name():
    with pytest.raises(NotImplementedError, match="softnpu_test::never_emulated"):
        torch.ops.softnpu_test.never_emulated(torch.ones(2, device="npu"))
    x = torch.ones(16, 16, dtype=torch.float16, device="npu")
    with pytest.raises(RuntimeError, match="no kernel for CPU"):
        torch.ops.softnpu.use_cpu_kernel("atb::npu_ring_mla", "")
    with pytest.raises(RuntimeError, match="CreateOperation failed"):
        torch_npu._npu_group_topk(self=x, k=1, group_num=4, n=1)


def test_counts():
    x, gamma = torch.ones(2, 8, device="npu"), torch.ones(8, device="npu")
    reset_counts()
    torch_npu.npu_rms_norm(x, gamma)
    y = x + 1
    y.mul_(2)
    y.view(16)
    x.cpu()
    counted = counts()
    launches = {name: number for name, number in counted.items() if name.startswith(("aclnn", "aten::"))}
    assert launches == {"aclnnRmsNorm": 1, "aten::add.Tensor": 1, "aten::mul_.Tensor": 1}
    assert counted["aclrtMemcpy"] + counted.get("aclrtMemcpyAsync", 0) == 1
