"""Which addresses kernels touch: rows past a count are neither read nor written, not even without consequence.

The interpreter's load and store are watched; values alone could not show a read whose result is thrown away.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

from tests.ut.kernels.test_gemm import PATHS
from vllm_ascend_moe.kernels.combine import combine
from vllm_ascend_moe.kernels.launch import expert_gemm
from vllm_ascend_moe.kernels.permute import permute_rows, plan_permutation
from vllm_ascend_moe.kernels.quantize import activate_rows

COUNTS = [70, 0, 3, 40, 16]
ROWS = 72


class Watch:
    """Addresses loaded from and stored to."""

    def __init__(self) -> None:
        self.loaded: list[np.ndarray] = []
        self.stored: list[np.ndarray] = []

    def rows(self, addresses: list[np.ndarray], tensor: torch.Tensor) -> torch.Tensor:
        """bool, the shape of tensor without its last dimension: the rows that were touched."""
        begin, size = tensor.data_ptr(), tensor.element_size()
        offsets = np.concatenate([part.ravel() for part in addresses]).astype(np.int64) - begin
        inside = offsets[(offsets >= 0) & (offsets < tensor.numel() * size)]
        touched = torch.zeros(tensor.numel(), dtype=torch.bool)
        touched[torch.from_numpy(inside // size)] = True
        return touched.view(tensor.shape).any(dim=-1)


@pytest.fixture
def watch(monkeypatch):
    seen, real = Watch(), interpreter._interpreter

    def load(pointers, mask, *rest):
        seen.loaded.append(pointers[mask.astype(bool)])
        return real.load(pointers, mask, *rest)

    def store(pointers, value, mask):
        seen.stored.append(pointers[mask.astype(bool)])
        return real.store(pointers, value, mask)

    others = {name: getattr(real, name) for name in dir(real) if not name.startswith("_")}
    monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(**{**others, "load": load, "store": store}))
    return seen


def own() -> torch.Tensor:
    return torch.arange(ROWS) < torch.tensor(COUNTS)[:, None]


@pytest.mark.parametrize("tiles", PATHS.values(), ids=PATHS)
def test_gemm_touches_exactly_its_own_rows(watch, tiles):
    a, w = torch.randn(5, ROWS, 32), torch.randn(5, 40, 32)
    scale, out = torch.rand(5, ROWS, 1), torch.zeros(5, ROWS, 40)
    expert_gemm(a, w, torch.tensor(COUNTS, dtype=torch.int32), a_scale=scale[..., 0], out=out, tiles=tiles)
    assert torch.equal(watch.rows(watch.loaded, a), own())
    assert torch.equal(watch.rows(watch.loaded, scale), own())
    assert torch.equal(watch.rows(watch.stored, out), own())


def test_activation_touches_exactly_its_own_rows(watch):
    x = torch.randn(5, ROWS, 80)
    q, scale = activate_rows(x, torch.tensor(COUNTS, dtype=torch.int32), quantize_to=torch.int8)
    assert torch.equal(watch.rows(watch.loaded, x), own())
    assert torch.equal(watch.rows(watch.stored, q), own())
    assert torch.equal(watch.rows(watch.stored, scale[..., None]), own())


def test_ragged_activation_touches_exactly_its_own_rows(watch):
    counts, starts = [5, 0, 9], [11, 30, 0]
    x = torch.randn(24, 80)
    q, scale = activate_rows(
        x,
        torch.tensor(counts, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32),
        quantize_to=torch.int8,
    )
    mine = torch.zeros(24, dtype=torch.bool)
    mine[:9] = mine[11:16] = True
    assert torch.equal(watch.rows(watch.loaded, x), mine)
    assert torch.equal(watch.rows(watch.stored, q), mine)
    assert torch.equal(watch.rows(watch.stored, scale[:, None]), mine)


def test_combine_reads_routed_slots_only(watch):
    y = torch.randn(12, 40)
    slots = torch.tensor([[3, -1], [-1, -1], [0, 11]], dtype=torch.int32)
    combine(y, slots, torch.ones(3, 2))
    assert watch.rows(watch.loaded, y).nonzero().flatten().tolist() == [0, 3, 11]


def test_permutation_writes_routed_positions_only(watch):
    x = torch.randn(3, 40)
    ids = torch.tensor([[1, -1], [-1, 9], [0, 1]])
    plan = plan_permutation(ids, 2)
    watch.stored.clear()  # what the plan had is free by now, and may be where the rows are
    out, _ = permute_rows(x, plan)
    assert watch.rows(watch.stored, out).tolist() == [True] * 3 + [False] * 3
    expert_map = torch.tensor([0, 1], dtype=torch.int32)
    watch.loaded.clear()
    plan_permutation(ids, 2, expert_map)
    assert watch.rows(watch.loaded, expert_map[:, None]).all()


FAR = 3 << 29  # elements from expert to expert: the third one begins past 2^31


def far(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that the system gives only where it is touched."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.empty(last + 1, dtype=dtype).as_strided(shape, strides)


@pytest.mark.parametrize("tiles", PATHS.values(), ids=PATHS)
def test_experts_further_apart_than_32_bits_count(tiles):
    counts = torch.tensor([0, 0, 70], dtype=torch.int32)
    a, w = far((3, 72, 32), (FAR, 32, 1), torch.int8), far((3, 40, 32), (FAR, 32, 1), torch.int8)
    out = far((3, 72, 40), (FAR, 48, 1), torch.bfloat16)
    a[2], w[2] = torch.randint(-2, 3, (72, 32)), torch.randint(-2, 3, (40, 32))
    expert_gemm(a, w, counts, out=out, tiles=tiles)
    assert torch.equal(out[2, :70], (a[2, :70].float() @ w[2].float().T).bfloat16())


@pytest.mark.parametrize("tiles", PATHS.values(), ids=PATHS)
def test_rows_further_down_than_32_bits_count(tiles):
    pitch = 1 << 20
    a, out = far((3000, 32), (pitch, 1), torch.int8), far((3000, 40), (pitch, 1), torch.bfloat16)
    a[2900:] = torch.randint(-2, 3, (100, 32))
    w = torch.randint(-2, 3, (1, 40, 32)).to(torch.int8)
    counts, starts = torch.tensor([[70], [2925]], dtype=torch.int32)
    expert_gemm(a, w, counts, starts=starts, out=out, tiles=tiles)
    assert torch.equal(out[2925:2995], (a[2925:2995].float() @ w[0].float().T).bfloat16())


def test_activation_of_rows_further_than_32_bits_count():
    x = far((3, 4, 64), (FAR, 64, 1), torch.bfloat16)
    x[2] = torch.randn(4, 64)
    y, _ = activate_rows(x.as_strided((3, 4, 64), x.stride()), torch.tensor([0, 0, 4], dtype=torch.int32))
    near, _ = activate_rows(x[2:].clone(), torch.tensor([4], dtype=torch.int32))
    assert torch.equal(y[2], near[0])
    ragged = far((3000, 64), (1 << 20, 1), torch.bfloat16)
    ragged[2990:2994] = x[2]
    counts, starts = torch.tensor([[4], [2990]], dtype=torch.int32)
    y, _ = activate_rows(ragged, counts, starts=starts)
    assert torch.equal(y[2990:2994], near[0])
