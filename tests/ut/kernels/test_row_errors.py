"""What the kernels that copy, sort and sum rows refuse: operands of another shape, dtype or device, or with gaps.

Kernels take addresses and trust them: an operand that is not refused here gives wrong rows, or reads past its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_ascend_moe.errors import InvalidValueError, ShapeError, UnsupportedError
from vllm_ascend_moe.kernels import targets
from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.permute import Permutation, permute_rows, plan_permutation, scatter_rows
from vllm_ascend_moe.kernels.sent_rows import look_up, pack_rows, plan_rows, sum_rows
from vllm_ascend_moe.kernels.slots import plan_slots

X, IDS, WEIGHTS = torch.ones(4, 8), torch.zeros((4, 2), dtype=torch.int32), torch.ones(4, 2)
MAP = torch.zeros(6, dtype=torch.int32)
SCALE = torch.ones(4)


def permute(x: torch.Tensor, positions: torch.Tensor, scale: torch.Tensor) -> object:
    return permute_rows(x, Permutation(positions=positions, counts=MAP, starts=MAP), scale)


def pack(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, **rest: Any) -> object:
    return pack_rows([hidden, weights, ids, scales], **rest)


# Every launching function, with operands that fit.
PACKED = {"hidden": X, "weights": WEIGHTS, "ids": IDS, "scales": SCALE, "slots": IDS}
LAYOUT: dict[str, Any] = {"starts": (0, 32, 40, 48), "row_bytes": 64, "rows": 8}
CALLS: dict[str, tuple[Callable[..., object], dict[str, torch.Tensor], dict[str, Any]]] = {
    "plan_permutation": (plan_permutation, {"topk_ids": IDS, "expert_map": MAP}, {"num_local": 2}),
    "permute_rows": (permute, {"x": X, "positions": IDS, "scale": SCALE}, {}),
    "scatter_rows": (
        scatter_rows,
        {"x": X, "positions": IDS, "out": torch.ones(8, 8), "scale": SCALE, "out_scale": torch.ones(8)},
        {},
    ),
    "combine": (combine, {"y": X, "slots": IDS, "weights": WEIGHTS, "out": torch.ones(4, 8)}, {}),
    "plan_slots": (plan_slots, {"topk_ids": IDS, "expert_map": MAP}, {"num_local": 2}),
    "plan_rows": (plan_rows, {"topk_ids": IDS, "owners": MAP}, {"ep_size": 2}),
    "pack_rows": (pack, PACKED, LAYOUT),
    "look_up": (look_up, {"index": IDS, "table": MAP}, {}),
    "sum_rows": (sum_rows, {"y": X, "slots": IDS}, {}),
}
COLUMNS = {"hidden": "columns[0]", "weights": "columns[1]", "ids": "columns[2]", "scales": "columns[3]"}
OPERANDS = [(name, operand) for name, (_, operands, _) in CALLS.items() for operand in operands]


@pytest.mark.parametrize("name", CALLS)
def test_operands_that_fit_are_accepted(name):
    call, operands, rest = CALLS[name]
    call(**operands, **rest)


@pytest.mark.parametrize(("name", "operand"), OPERANDS, ids=lambda text: text)
def test_an_operand_on_another_device_is_named(name, operand):
    """Another device is "meta" here, which has no memory at all: what reaches a kernel fails, but without a name."""
    call, operands, rest = CALLS[name]
    names = COLUMNS if name == "pack_rows" else {}
    first = "slots" if name == "pack_rows" else next(iter(operands))
    # Where the first operand is the one elsewhere, all others are.
    wrong = [other for other in operands if other != first] if operand == first else [operand]
    with pytest.raises(ShapeError) as caught:
        call(**{**operands, operand: operands[operand].to("meta")}, **rest)
    assert caught.value.field in [f"{names.get(each, each)}.device" for each in wrong]
    assert caught.value.action


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, two elements apart."""
    return x.repeat_interleave(2, -1)[..., ::2]


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "permutation of ids 1-D": ("plan_permutation", {"topk_ids": IDS[0]}, "topk_ids"),
    "permutation of float ids": ("plan_permutation", {"topk_ids": WEIGHTS}, "topk_ids"),
    "permutation by a strided map": ("plan_permutation", {"expert_map": strided(MAP)}, "expert_map"),
    "permutation by a map 2-D": ("plan_permutation", {"expert_map": IDS}, "expert_map"),
    "permutation by a float map": ("plan_permutation", {"expert_map": SCALE}, "expert_map"),
    "permutation to -1 experts": ("plan_permutation", {"num_local": -1}, "num_local"),
    "permutation past int32": ("plan_permutation", {"topk_ids": IDS[:1, :1].expand(1 << 16, 1 << 15)}, "rows * K"),
    "permuted rows 1-D": ("permute_rows", {"x": SCALE}, "x"),
    "permuted scales with gaps": ("permute_rows", {"scale": strided(SCALE)}, "scale"),
    "permuted scales too short": ("permute_rows", {"scale": SCALE[:3]}, "scale"),
    "permuted scales 2-D": ("permute_rows", {"scale": SCALE[:, None]}, "scale"),
    "permuted scales fp16": ("permute_rows", {"scale": SCALE.half()}, "scale"),
    "permuted rows too few": ("permute_rows", {"x": X[:3]}, "x"),
    "permuted rows with gaps": ("permute_rows", {"x": strided(X)}, "x"),
    "scattered rows 1-D": ("scatter_rows", {"x": SCALE}, "x"),
    "scattered rows 3-D": ("scatter_rows", {"x": X[None]}, "x"),
    "scattered rows too few": ("scatter_rows", {"x": X[:3]}, "x"),
    "scattered rows with gaps": ("scatter_rows", {"x": strided(X)}, "x"),
    "scattered to 1-D": ("scatter_rows", {"out": SCALE}, "out"),
    "scattered to other columns": ("scatter_rows", {"out": torch.ones(8, 9)}, "out"),
    "scattered to another dtype": ("scatter_rows", {"out": torch.ones(8, 8).half()}, "out"),
    "scattered to gaps": ("scatter_rows", {"out": strided(torch.ones(8, 8))}, "out"),
    "scattered by int64": ("scatter_rows", {"positions": IDS.long()}, "positions"),
    "scattered by positions 1-D": ("scatter_rows", {"positions": MAP}, "positions"),
    "scattered by positions with gaps": ("scatter_rows", {"positions": strided(IDS)}, "positions"),
    "scattered scales with gaps": ("scatter_rows", {"scale": strided(SCALE)}, "scale"),
    "scattered scales too short": ("scatter_rows", {"scale": SCALE[:3]}, "scale"),
    "scattered scales bf16": ("scatter_rows", {"scale": SCALE.bfloat16()}, "scale"),
    "scales scattered to gaps": ("scatter_rows", {"out_scale": strided(torch.ones(8))}, "out_scale"),
    "scales scattered to too few": ("scatter_rows", {"out_scale": SCALE}, "out_scale"),
    "scales scattered to nothing": ("scatter_rows", {"out_scale": None}, "scale"),
    "no scales scattered": ("scatter_rows", {"scale": None}, "scale"),
    "combined int8": ("combine", {"y": X.to(torch.int8)}, "y"),
    "combined fp64": ("combine", {"y": X.double()}, "y"),
    "combined 1-D": ("combine", {"y": SCALE}, "y"),
    "combined with gaps": ("combine", {"y": strided(X)}, "y"),
    "combined by int64": ("combine", {"slots": IDS.long()}, "slots"),
    "combined by slots with gaps": ("combine", {"slots": strided(IDS)}, "slots"),
    "combined by slots 1-D": ("combine", {"slots": MAP}, "slots"),
    "combined by weights of another shape": ("combine", {"weights": torch.ones(4, 3)}, "weights"),
    "combined by weights fp16": ("combine", {"weights": WEIGHTS.half()}, "weights"),
    "combined to int8": ("combine", {"out": X.to(torch.int8)}, "out"),
    "combined to fp64": ("combine", {"out": X.double()}, "out"),
    "combined to gaps": ("combine", {"out": strided(X)}, "out"),
    "combined to other rows": ("combine", {"out": X[:3]}, "out"),
    "slots of ids with gaps": ("plan_slots", {"topk_ids": strided(IDS)}, "topk_ids"),
    "slots of ids 1-D": ("plan_slots", {"topk_ids": MAP}, "topk_ids"),
    "slots of float ids": ("plan_slots", {"topk_ids": WEIGHTS}, "topk_ids"),
    "slots by a map 2-D": ("plan_slots", {"expert_map": IDS}, "expert_map"),
    "slots by a strided map": ("plan_slots", {"expert_map": strided(MAP)}, "expert_map"),
    "slots by a map of int64": ("plan_slots", {"expert_map": MAP.long()}, "expert_map"),
    "slots of choices past int32": ("plan_slots", {"topk_ids": IDS[:1].expand(1 << 30, 2), "num_local": 1}, "rows"),
    "slots of -1 experts": ("plan_slots", {"num_local": -1}, "num_local"),
    "slots past int32": ("plan_slots", {"num_local": 1 << 29}, "rows"),
    "plan of float ids": ("plan_rows", {"topk_ids": WEIGHTS}, "topk_ids"),
    "plan of ids 1-D": ("plan_rows", {"topk_ids": MAP}, "topk_ids"),
    "plan of rows past int32": ("plan_rows", {"topk_ids": IDS[:1, :1].expand(1 << 16, 1 << 15)}, "T * K"),
    "plan by strided owners": ("plan_rows", {"owners": strided(MAP)}, "owners"),
    "plan by owners of int64": ("plan_rows", {"owners": MAP.long()}, "owners"),
    "plan by owners 2-D": ("plan_rows", {"owners": IDS}, "owners"),
    "plan by owners without ends": ("plan_rows", {"owners": MAP[:1]}, "owners"),
    "plan for no ranks": ("plan_rows", {"ep_size": 0}, "ep_size"),
    "packed by int64": ("pack_rows", {"slots": IDS.long()}, "slots"),
    "packed by slots 1-D": ("pack_rows", {"slots": MAP}, "slots"),
    "packed by slots with gaps": ("pack_rows", {"slots": strided(IDS)}, "slots"),
    "packed rows too few": ("pack_rows", {"weights": WEIGHTS[:3]}, "columns"),
    "packed without a start": ("pack_rows", {"starts": (0, 32, 40)}, "starts"),
    "packed past the first byte": ("pack_rows", {"starts": (4, 36, 44, 52)}, "starts[0]"),
    "packed over the next column": ("pack_rows", {"starts": (0, 32, 40, 44)}, "starts[2]"),
    "packed over the next row": ("pack_rows", {"starts": (0, 32, 40, 64)}, "starts[3]"),
    "packed into odd rows": ("pack_rows", {"row_bytes": 60}, "row_bytes"),
    "looked up 1-D": ("look_up", {"index": MAP}, "index"),
    "looked up 3-D": ("look_up", {"index": IDS[None]}, "index"),
    "looked up with gaps": ("look_up", {"index": strided(IDS)}, "index"),
    "looked up floats": ("look_up", {"index": WEIGHTS, "table": SCALE}, "index"),
    "looked up in gaps": ("look_up", {"table": strided(MAP)}, "table"),
    "looked up in 2-D": ("look_up", {"table": IDS}, "table"),
    "looked up in another dtype": ("look_up", {"table": MAP.long()}, "table"),
    "sums of rows apart": ("sum_rows", {"y": torch.ones(4, 16)[:, :8]}, "y"),
    "sums of gaps": ("sum_rows", {"y": strided(X)}, "y"),
    "sums of 1-D": ("sum_rows", {"y": SCALE}, "y"),
    "sums of int8": ("sum_rows", {"y": X.to(torch.int8)}, "y"),
    "sums by int64": ("sum_rows", {"slots": IDS.long()}, "slots"),
    "sums by slots with gaps": ("sum_rows", {"slots": strided(IDS)}, "slots"),
    "sums by slots 1-D": ("sum_rows", {"slots": MAP}, "slots"),
}


@pytest.mark.parametrize("case", WRONG)
def test_operands_that_do_not_fit_are_named(case):
    name, changed, field = WRONG[case]
    call, operands, rest = CALLS[name]
    with pytest.raises(InvalidValueError) as caught:
        call(**{**operands, **rest, **changed})
    assert caught.value.field == field
    assert caught.value.limit
    assert caught.value.action


def test_every_operand_is_refused_for_its_form_somewhere():
    """But ids and scales of packed rows, whose form is free."""
    refused = {(name, field) for name, _, field in WRONG.values()}
    missing = {(name, operand) for name, operand in OPERANDS if operand not in COLUMNS} - refused
    assert missing == {("permute_rows", "positions")}  # they are made by plan_permutation


@pytest.mark.parametrize(
    ("hip", "capability", "target", "fp8"),
    [
        (None, (9, 0), "hopper", True),
        (None, (8, 0), "cuda", False),
        (None, (10, 0), "cuda", True),
        ("6.2", (9, 4), "cuda", False),  # MI300
        ("6.2", (12, 0), "cuda", False),  # RX 9070
    ],
)
def test_an_amd_gpu_is_no_hopper_and_has_no_fp8_of_ours(monkeypatch, hip, capability, target, fp8):
    """torch's answers about a GPU are written down here; there is none."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert targets._target_of.__wrapped__(device) == target
    if fp8:
        targets.check_fp8(target, device)
    else:
        with pytest.raises(UnsupportedError, match="fp8"):
            targets.check_fp8(target, device)
