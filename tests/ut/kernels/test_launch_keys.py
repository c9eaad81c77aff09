"""Keys of cached launches: two launches with an equal key are ones for which Triton compiles one and the same code.

What Triton specialises is written down here as its documentation has it and compared with the keys; nothing compiles.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from vllm_ascend_moe.comm import row_plan
from vllm_ascend_moe.kernels import sent_rows
from vllm_ascend_moe.ops.row_bytes import RowFormat
from vllm_ascend_moe.placement import ExpertPlacement


def specialised(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the compiled code depends on, for each argument."""
    parameters, not_specialised = inspect.signature(kernel.fn).parameters, kernel.kwargs.get("do_not_specialize") or []
    found: list[Any] = []
    for (name, parameter), value in zip(parameters.items(), arguments, strict=True):
        if value is None or "constexpr" in str(parameter.annotation):
            found.append(str(value))
        elif isinstance(value, torch.Tensor):
            found.append((value.dtype, value.data_ptr() % 16 == 0))
        else:
            width = 32 if -(1 << 31) <= value < 1 << 31 else 64
            found.append(width if name in not_specialised else (width, value == 1, value % 16 == 0))
    return tuple(found)


def moved(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, contiguous, ``by`` elements past the start of an allocation."""
    return torch.cat([x.flatten()[:1].expand(by), x.flatten()])[by:].view(x.shape)


@pytest.fixture
def launches(monkeypatch) -> list[tuple[Any, tuple[Any, ...]]]:
    found: list[tuple[Any, tuple[Any, ...]]] = []

    def record(kernel: Any, programs: int, key: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        found.append((key, (kernel.fn.__name__, specialised(kernel, arguments), *options.items())))

    monkeypatch.setattr(sent_rows, "launch", record)
    return found


def assert_one_code_a_key(launches: list[tuple[Any, tuple[Any, ...]]], least: int) -> None:
    codes: dict[Any, set[tuple[Any, ...]]] = {}
    for key, code in launches:
        codes.setdefault(key, set()).add(code)
    for key, different in codes.items():
        assert len(different) == 1, key
    assert len(launches) > len(codes) >= least


TWICE = (0, 1) * 2


def test_plans(launches):
    for tokens, topk, ranks, dtype in itertools.product(
        (1, 3, 64, 700), (1, 2, 16), (1, 2, 9), (torch.int32, torch.int64)
    ):
        owners = torch.zeros(18, dtype=torch.int32)
        for ids_by, owners_by, code in itertools.product(TWICE, TWICE, (0, 1, 16, 96 << 32)):
            ids = moved(torch.zeros((tokens, topk), dtype=dtype), ids_by)
            sent_rows.plan_rows(ids, moved(owners, owners_by), ranks, code)
    assert_one_code_a_key(launches, least=200)


def test_rows_and_ids(launches):
    placement = ExpertPlacement.linear(6, 4)
    for tokens, dtype, hidden, scaled in itertools.product(
        (1, 5, 16), (torch.int32, torch.int64), (7, 64), (False, True)
    ):
        for by in itertools.product((0, 1), repeat=4):
            columns = [torch.ones(tokens, hidden), torch.ones(tokens, 2), torch.zeros((tokens, 2), dtype=dtype)]
            columns += [torch.ones(tokens)] if scaled else []
            given = [moved(x, each) for x, each in zip(columns, by, strict=False)]
            form, slots = RowFormat.of(given), torch.zeros((tokens, 2), dtype=torch.int32)
            for slots_by in TWICE:
                sent_rows.pack_rows(given, form.starts, form.row_bytes, moved(slots, slots_by), 32)
            table = row_plan.own_ids(placement, 1, dtype, slots.device)
            for table_by in TWICE:
                sent_rows.look_up(given[2], moved(table, table_by))
    assert_one_code_a_key(launches, least=100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums(launches, dtype):
    for tokens, hidden, width in itertools.product((1, 2, 15, 16, 32), (1, 16, 40), (1, 3)):
        for y_by, slots_by in itertools.product(TWICE, TWICE):
            slots = torch.zeros((tokens, width), dtype=torch.int32)
            sent_rows.sum_rows(moved(torch.ones((9, hidden), dtype=dtype), y_by), moved(slots, slots_by))
    assert_one_code_a_key(launches, least=50)
