"""What expert_gemm refuses, and that the error names the field."""

from __future__ import annotations

import sys

import pytest
import torch

from vllm_ascend_moe.errors import AscendMoEError, InvalidValueError, ShapeError, UnsupportedError
from vllm_ascend_moe.kernels import sent_rows, targets
from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.permute import plan_permutation, scatter_rows
from vllm_ascend_moe.kernels.quantize import activate_rows
from vllm_ascend_moe.kernels.slots import plan_slots
from vllm_ascend_moe.kernels.targets import check_fp8, target_of
from vllm_ascend_moe.kernels.tiles import (
    HOPPER_16BIT,
    TILE_TABLE,
    GemmTiles,
    TilesError,
    ascend_tiles,
    tiles_for,
    without_tma,
)
from vllm_ascend_moe.kernels.tune import fastest_tiles

A, W, COUNTS = torch.randn(2, 4, 16), torch.randn(2, 8, 16), torch.tensor([4, 1], dtype=torch.int32)

WRONG = {
    "a": {"a": torch.randn(2, 4, 17)},
    "a.dtype": {"a": A.half()},
    "a.stride(-1)": {"a": torch.randn(2, 4, 32)[:, :, ::2]},
    "w": {"w": W[0]},
    "w.stride(2)": {"w": torch.randn(2, 8, 32)[:, :, ::2]},
    "w.shape[1]": {"w": torch.randn(2, 7, 16), "activation": "silu"},
    "counts": {"counts": COUNTS.long()},
    "counts.stride(0)": {"counts": torch.tensor([[4, 9], [1, 9]], dtype=torch.int32)[:, 0]},
    "starts": {"a": A[0], "starts": COUNTS[:1]},
    "starts.stride(0)": {"a": A[0], "starts": torch.tensor([[0, 9], [3, 9]], dtype=torch.int32)[:, 0]},
    "a_scale": {"a_scale": torch.ones(2, 3)},
    "w_scale": {"w_scale": torch.ones(2, 16)[:, ::2]},
    "bias": {"bias": torch.ones(2, 8).int()},
    "out": {"out": torch.empty(2, 4, 9)},
    "out.stride(-1)": {"out": torch.empty(2, 4, 16)[:, :, ::2]},
    "device": {"counts": torch.empty(2, dtype=torch.int32, device="meta")},
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_operands_are_refused_by_name(field):
    with pytest.raises(ShapeError) as caught:
        expert_gemm(**{"a": A, "w": W, "counts": COUNTS, **WRONG[field]})
    assert caught.value.field == field
    assert caught.value.action


def test_one_number_has_any_stride():
    one = torch.tensor([[4, 9]], dtype=torch.int32)[:, 0].as_strided((1,), (7,))
    assert torch.equal(expert_gemm(A[:1], W[:1], one), expert_gemm(A[:1], W[:1], COUNTS[:1]))


GOOD = {"block_m": 64, "block_n": 32, "block_k": 32}
CONTRADICTIONS = {
    "block_m": {"block_m": 48},
    "block_n": {"block_n": 8},
    "few_k": {"few_k": 0},
    "few_m-none": {"tma": True},
    "few_m-narrow": {"tma": True, "few_m": 16},
    "few_m-wide": {"few_m": 128},
    "stages": {"stages": 0},
    "programs": {"programs": 0},
    "halves": {"block_n": 16, "halves": True},
    "store_n": {"store_n": 48},
}


@pytest.mark.parametrize("field", CONTRADICTIONS)
def test_tiles_that_contradict_themselves_are_refused(field):
    GemmTiles(**GOOD, tma=True, few_m=32)
    with pytest.raises(TilesError) as caught:
        GemmTiles(**{**GOOD, **CONTRADICTIONS[field]})
    assert caught.value.field == field.split("-")[0]


DESCRIPTORS = GemmTiles(**GOOD, tma=True, few_m=32)
NOT_FOR_DESCRIPTORS = {
    "experts at no whole number of rows": torch.randn(500).as_strided((2, 4, 16), (100, 24, 1)),
    "rows at 4 bytes": torch.randn(2, 4, 17)[:, :, :16],
    "address at 4 bytes": torch.randn(2, 4, 20)[:, :, 1:17],
}


@pytest.mark.parametrize("a", NOT_FOR_DESCRIPTORS.values(), ids=NOT_FOR_DESCRIPTORS)
def test_given_tiles_for_descriptors_refuse_operands_that_these_cannot_hold(a):
    with pytest.raises(TilesError) as caught:
        expert_gemm(a, W, COUNTS, tiles=DESCRIPTORS)
    assert caught.value.field == "tiles.tma"
    wanted = torch.einsum("emk,enk->emn", a, W)
    chosen = fastest_tiles(
        a, W, COUNTS, candidates=[DESCRIPTORS, GemmTiles(**GOOD)], measure=lambda call: call() is None
    )
    assert chosen == GemmTiles(**GOOD)
    out = expert_gemm(a, W, COUNTS, tiles=chosen)
    for expert, count in enumerate(COUNTS.tolist()):
        torch.testing.assert_close(out[expert, :count], wanted[expert, :count])


def test_given_tiles_too_narrow_for_gate_and_up_are_refused():
    narrow = GemmTiles(block_m=64, block_n=16, block_k=32)
    with pytest.raises(TilesError, match=r"tiles.block_n = 16, but it must be 32 or more"):
        expert_gemm(A, W, COUNTS, activation="silu", tiles=narrow)


def test_an_unknown_activation_is_refused():
    with pytest.raises(InvalidValueError, match="swish"):
        expert_gemm(A, W, COUNTS, activation="swish")


def test_a_device_without_triton_is_refused():
    with pytest.raises(UnsupportedError, match="CUDA and NPU"):
        target_of(torch.device("meta"))
    assert issubclass(UnsupportedError, AscendMoEError)


IDS, TOKENS = torch.zeros((4, 2), dtype=torch.int32), torch.randn(4, 16)
LAUNCHES = {
    "expert_gemm": lambda: expert_gemm(A, W, COUNTS),
    "activate_rows": lambda: activate_rows(A, COUNTS),
    "plan_permutation": lambda: plan_permutation(IDS, 2),
    "scatter_rows": lambda: scatter_rows(TOKENS, IDS, torch.empty(8, 16)),
    "combine": lambda: combine(TOKENS, IDS),
    "plan_slots": lambda: plan_slots(IDS, COUNTS, 2),
    "plan_rows": lambda: sent_rows.plan_rows(IDS, COUNTS, 1),
    "pack_rows": lambda: sent_rows.pack_rows([TOKENS] * 3, (0, 64, 128), 192, IDS, 8),
    "look_up": lambda: sent_rows.look_up(IDS, COUNTS),
    "sum_rows": lambda: sent_rows.sum_rows(TOKENS, IDS),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_operands_that_are_not_on_the_current_device_are_refused(launch, monkeypatch):
    """Two GPUs in one process. There are none here: that operands are on ``cuda:1`` and the current device has index 0
    is said, not so; the test does not show what Triton would do."""
    device_of = targets.target_of
    for module in {sys.modules[name] for name in sys.modules if name.startswith("vllm_ascend_moe.kernels.")}:
        if hasattr(module, "target_of"):
            monkeypatch.setattr(module, "target_of", lambda device: device_of(torch.device("cuda", 1)))
    monkeypatch.setattr(targets, "_target_of", lambda device: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with pytest.raises(InvalidValueError, match=r"device = 'cuda:1', but it must be the current device, index 0\."):
        launch()


def test_operands_on_the_current_device_are_not(monkeypatch):
    monkeypatch.setattr(targets, "_target_of", lambda device: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert target_of(torch.device("cuda", 1)) == target_of(torch.device("cuda")) == "cuda"


ROWS = {f"{target}-{size}": (target, size, tiles) for (target, size), tiles in TILE_TABLE.items()}
ROWS |= {f"hopper-2-{name}": ("hopper", 2, tiles) for name, tiles in HOPPER_16BIT.items()}


@pytest.mark.parametrize(("target", "itemsize", "tiles"), ROWS.values(), ids=ROWS)
def test_tiles_of_the_table_are_consistent(target, itemsize, tiles):
    if target == "hopper":  # 227 KiB of shared memory a multiprocessor, less what Triton needs for barriers
        steps = [(tiles.stages, tiles.block_m + tiles.block_n, tiles.block_k)]
        if tiles.few_m:
            steps += [(tiles.few_stages, tiles.few_m + tiles.few_n, tiles.few_k)]
            steps += [(tiles.narrow_stages, 16 + tiles.few_n, tiles.few_k)]
        stored = tiles.block_m * tiles.store_n * itemsize
        assert (max(s * rows * k * itemsize for s, rows, k in steps) + stored) * tiles.programs < 225 * 1024
    for columns in (tiles.block_n, tiles.block_n // 2):  # ungated, gated: in one piece or two
        assert not tiles.store_n or columns // min(columns, tiles.store_n) in (1, 2)


MANY = (1 << 20, 2048, 132)  # weight rows, depth, multiprocessors


def test_the_hint_and_the_weights_choose_the_row_of_the_table():
    rows = HOPPER_16BIT
    assert tiles_for("hopper", torch.bfloat16, *MANY) == rows["any_rows"]
    assert tiles_for("hopper", torch.bfloat16, *MANY, expected_rows=1) == rows["any_rows"]
    assert tiles_for("hopper", torch.float16, *MANY, expected_rows=4096) == rows["many_rows"]
    assert tiles_for("hopper", torch.bfloat16, 4 * 1536, 2048, 132) == rows["few_weights"]
    assert tiles_for("hopper", torch.bfloat16, 4 * 1536, 2048, 132, expected_rows=64) == rows["few_weights"]
    assert tiles_for("hopper", torch.bfloat16, 4 * 1536, 2048, 132, expected_rows=4096) == rows["many_rows"]
    # 2 x 66 tiles of 128 x 128 are one round of 132 programs; one more weight row, or row, and they are not.
    assert tiles_for("hopper", torch.bfloat16, 66 * 128, 2048, 132, expected_rows=256) == rows["one_round"]
    assert tiles_for("hopper", torch.bfloat16, 66 * 128 + 1, 2048, 132, expected_rows=256) == rows["many_rows"]
    assert tiles_for("hopper", torch.bfloat16, 66 * 128, 2048, 132, expected_rows=257) == rows["many_rows"]
    # A short K: two programs a multiprocessor hide the stores.
    assert tiles_for("hopper", torch.bfloat16, 1 << 20, 768, 132, expected_rows=1024) == rows["any_rows"]
    assert tiles_for("hopper", torch.bfloat16, 1 << 20, 768, 132, expected_rows=1023) == rows["many_rows"]
    assert tiles_for("hopper", torch.bfloat16, 1 << 20, 1024, 132, expected_rows=1024) == rows["many_rows"]


def test_few_rows_are_shared_evenly_where_three_narrow_tiles_a_multiprocessor_are_one_round():
    even = HOPPER_16BIT["even_share"]
    for weight_rows, depth, rows, wanted in (
        (2 * 132 * 64 + 1, 2048, 1, even),
        (3 * 132 * 64, 2048, 32, even),
        (3 * 132 * 64, 1024, 32, even),
        (2 * 132 * 64, 2048, 1, HOPPER_16BIT["any_rows"]),
        (3 * 132 * 64 + 1, 2048, 1, HOPPER_16BIT["any_rows"]),
        (3 * 132 * 64, 1023, 32, HOPPER_16BIT["any_rows"]),
        (3 * 132 * 64, 2048, 33, HOPPER_16BIT["any_rows"]),
        (3 * 132 * 64, 2048, None, HOPPER_16BIT["any_rows"]),
    ):
        assert tiles_for("hopper", torch.bfloat16, weight_rows, depth, 132, expected_rows=rows) == wanted
        gated = tiles_for("hopper", torch.bfloat16, weight_rows, depth, 132, rows, activation="silu", parts=2)
        assert gated == HOPPER_16BIT["any_rows"]


def test_other_rows_take_no_hint():
    assert tiles_for("ascend", torch.bfloat16, *MANY, expected_rows=4096) == TILE_TABLE["ascend", 2]
    assert tiles_for("hopper", torch.int8, *MANY, expected_rows=4096) == TILE_TABLE["hopper", 1]
    assert not without_tma("hopper", torch.bfloat16).tma


def test_fp8_is_refused_where_the_hardware_has_none():
    with pytest.raises(UnsupportedError, match="int8"):
        check_fp8("ascend", torch.device("cpu"))
    check_fp8("interpreter", torch.device("cpu"))


def test_ascend_tiles_leave_room_for_the_epilogue():
    plain = TILE_TABLE["ascend", 2]
    assert ascend_tiles(plain, "silu", parts=2) == plain
    assert ascend_tiles(plain, "silu", parts=1).block_n == 128
    assert tiles_for("ascend", torch.bfloat16, *MANY, activation="swiglu_oai", parts=2).block_n == 128
