"""No parameter of an aclnn function is ignored without saying why: every one has a name that the compiler would call
unused, or a comment in its place, and what would change results is refused."""

import re
from pathlib import Path

import pytest
import torch
import torch_npu
from cann import CannError, call, stream

from vllm_ascend_moe.softnpu.settings import folders

BF16 = torch.bfloat16
X, WEIGHT = torch.randn(6, 8).to(BF16).npu(), torch.randn(2, 8, 4).to(BF16).npu()
GROUPS = torch.tensor([2, 4]).npu()


def parameters(source: str) -> list[tuple[str, str]]:
    """(function, parameter) of every ACLNN_OP in a C++ source.

    >>> parameters("ACLNN_OP(aclnnF, const aclTensor* x, double /*eps: none, here*/, bool) {")
    [('aclnnF', 'const aclTensor* x'), ('aclnnF', 'double /*eps: none, here*/'), ('aclnnF', 'bool')]
    """
    found = []
    for match in re.finditer(r"^ACLNN_OP\((\w+),(.*?)\) \{", source, re.MULTILINE | re.DOTALL):
        pieces = re.findall(r"(?:/\*.*?\*/|[^,/])+", match[2], re.DOTALL)
        found += [(match[1], " ".join(piece.split())) for piece in pieces]
    return found


def test_an_unnamed_parameter_says_why():
    assert parameters("ACLNN_OP(aclnnF, bool /*a: b, c*/, int64_t) {") == [
        ("aclnnF", "bool /*a: b, c*/"),
        ("aclnnF", "int64_t"),
    ]
    found = [p for file in (folders().source / "opapi").glob("*.cpp") for p in parameters(Path(file).read_text())]
    assert len(found) > 300
    silent = [p for p in found if re.fullmatch(r"(const )?\w+[*&]?", p[1]) and p[1] not in ("TENSORS", "ATTRIBUTES")]
    assert silent == []


def grouped(**keywords):
    given = {"split_item": 3, "group_type": 0, "group_list_type": 1, **keywords}
    return torch_npu.npu_grouped_matmul([X], [WEIGHT], group_list=GROUPS, **given)


@pytest.mark.parametrize(
    "name",
    [
        *("offset", "antiquant_scale", "antiquant_offset"),
        *("activation_input", "activation_quant_scale", "activation_quant_offset"),
    ],
)
def test_lists_of_grouped_matmul_that_are_not_emulated(name):
    grouped(**{name: []})
    with pytest.raises(RuntimeError, match=f"{name} = .* is not emulated; add it to csrc/softnpu/opapi/"):
        grouped(**{name: [X]})


def test_tuning_config_is_for_speed_alone():
    assert torch.equal(grouped()[0].cpu(), grouped(tuning_config=[4])[0].cpu())


def test_less_precision_than_the_types_say():
    a, b = torch.randn(3, 5, 7).npu(), torch.randn(3, 7, 4).npu()
    torch_npu.npu_transpose_batchmatmul(a, b, perm_y=[1, 0, 2])
    torch.npu.matmul.allow_hf32 = True
    try:
        with pytest.raises(RuntimeError, match=r"cube_math_type with float32 = \d is not emulated"):
            torch_npu.npu_transpose_batchmatmul(a, b, perm_y=[1, 0, 2])
        torch_npu.npu_transpose_batchmatmul(a.to(BF16), b.to(BF16), perm_y=[1, 0, 2])
    finally:
        torch.npu.matmul.allow_hf32 = False


def test_another_arithmetic_is_refused():
    call("aclrtSetDeviceSatMode", 1)
    with pytest.raises(CannError, match="mode = 0 \\(saturation\\) is not emulated"):
        call("aclrtSetDeviceSatMode", 0)
    call("aclrtSetStreamOverflowSwitch", stream(), 0)
    with pytest.raises(CannError, match="flag = 1 is not emulated"):
        call("aclrtSetStreamOverflowSwitch", stream(), 1)


def test_unknown_precision_of_attention_is_refused():
    heads = torch.randn(4, 2, 16).to(BF16).npu()
    given = {"input_layout": "TND", "actual_seq_lengths": [4], "actual_seq_lengths_kv": [4], "num_heads": 2}
    outputs = [torch_npu.npu_fused_infer_attention_score(*[heads] * 3, **given, inner_precise=p)[0] for p in (0, 1)]
    assert torch.equal(*(out.cpu() for out in outputs))
    with pytest.raises(RuntimeError, match="inner_precise = 4 is not emulated"):
        torch_npu.npu_fused_infer_attention_score(*[heads] * 3, **given, inner_precise=4)
