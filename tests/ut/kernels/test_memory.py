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
