"""torch.compile on npu tensors: our two operators on two ranks over HCCL; torch_npu's own fakes of MoE operators.

Proves that the fake implementations say what the real operators return (shape, strides, dtype, device), that opcheck
accepts both, and that one graph is right at other token counts, with the backends "eager" and "aot_eager". Does not
prove anything about code generation for an NPU: no such backend runs here.
"""

import compile_npu
import pytest
import torch
from test_moe_contract import CALLS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vllm_ascend_moe.testing.launch import launch


@pytest.fixture(scope="module")
def reports():
    return launch(2, compile_npu.body, backend="hccl", timeout_s=200)


@pytest.mark.parametrize("what", ["fakes", "symbolic", "opcheck"])
def test_operators(reports, what):
    assert [report[what] for report in reports] == [[], []]


@pytest.mark.parametrize("case", compile_npu.CASES)
def test_a_compiled_model_is_right_at_every_token_count(reports, case):
    assert [report["steps"][case]["wrong"] for report in reports] == [[], []]


@pytest.mark.parametrize("case", [case for case in compile_npu.CASES if "no metadata" not in case])
def test_counts_of_the_other_rank_do_not_compile_again(reports, case):
    kept = compile_npu.KEPT
    assert reports[0]["steps"][case]["graphs"][:kept] == [1] * kept


def described(result):
    return [(tuple(t.shape), t.dtype, t.device) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_torch_npus_fakes_agree_with_its_operators(name):
    """torch_npu brings them; were one wrong or missing, a graph with our experts could not be traced."""
    operator, *arguments = CALLS[name]
    keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
    called = getattr(torch.ops.npu, operator)
    real = called(*arguments, **keywords)
    with FakeTensorMode() as mode:
        fake_arguments, fake_keywords = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, keywords))
        fake = called(*fake_arguments, **fake_keywords)
    assert described(fake) == described(real)
