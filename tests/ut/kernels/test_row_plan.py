"""All-to-all by row in Triton's interpreter against plain torch, bit for bit: the plan, rows of bytes, ids, sums.

Neither speed nor the compiled form: tests/e2e/cuda/test_row_kernels.py and the Ascend check are for these.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_cases import UNTOUCHED
from tests.row_cases import HARD, Routed, in_form, whole_layer
from vllm_ascend_moe.comm import row_plan
from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.kernels import sent_rows
from vllm_ascend_moe.ops.row_bytes import RowFormat
from vllm_ascend_moe.placement import ExpertPlacement


def assert_same_plans(case: Routed, code: int = 0) -> None:
    mine, plain = (in_form(form, lambda: case.plan(code)) for form in ("triton", "torch"))
    for name in ("entries", "slots"):
        found, wanted = getattr(mine, name), getattr(plain, name)
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name
        assert found.is_contiguous(), name
    assert torch.equal(mine.codes[0], plain.codes[0])
    assert mine.codes.dtype == torch.int64


@settings(deadline=None, max_examples=40)
@given(drawn=st.data())
def test_plans_are_those_of_plain_torch(drawn):
    """One program, several that count for themselves, and two launches: by the size of a tile."""
    ranks = drawn.draw(st.integers(1, 9), label="R")
    owners = drawn.draw(st.lists(st.integers(-1, ranks - 1), min_size=1, max_size=12), label="rank of each expert")
    case = Routed.random(
        tokens=drawn.draw(st.integers(0, 70), label="T"),
        topk=drawn.draw(st.integers(0, 7), label="K"),
        placement=ExpertPlacement.of(owners, ranks),
        dtype=drawn.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype"),
        strided=drawn.draw(st.sampled_from(["no", "rows", "both"]), label="strided"),
        seed=drawn.draw(st.integers(0, 999), label="seed"),
    )
    tile, alone, blocks = drawn.draw(st.sampled_from([(128, 4, 128), (64, 0, 128), (64, 1, 2), (1024, 4, 128)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sent_rows.PLAN_TILE, "interpreter", tile)
        patch.setattr(sent_rows, "_SELF_COUNTED", alone)
        patch.setattr(sent_rows, "_BLOCKS", blocks)
        sent_rows.plan_tiles.cache_clear()
        assert_same_plans(case, code=drawn.draw(st.sampled_from([0, 5, 14400 << 32]), label="code"))
    sent_rows.plan_tiles.cache_clear()


@pytest.mark.parametrize("name", HARD)
def test_hard_plans(name):
    assert_same_plans(HARD[name](), code=16 << 32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("scales", [None, (), (3,), (70,), (2, 3)], ids=str)
@pytest.mark.parametrize("hidden_size", [1, 7, 64, 70])
def test_rows_of_bytes_are_those_of_plain_torch(dtype, scales, hidden_size):
    """Each column, read back in place; a strided hidden; the smallest words where sizes are odd."""
    case = Routed.random(13, 3, ExpertPlacement.linear(6, 4), seed=hidden_size)
    columns = case.columns(dtype, hidden_size, scales)

    def call():
        plan = case.plan()
        rows = int(plan.codes[0].sum())
        given = [*columns[:2], plan.entries, *columns[2:]]
        form = RowFormat.of(given)
        wire = row_plan.pack_rows(plan, form, given, rows)
        assert wire.shape == (rows, form.row_bytes)
        return form.views(wire)

    for mine, plain in zip(in_form("triton", call), in_form("torch", call), strict=True):
        assert mine.dtype == plain.dtype
        assert torch.equal(mine, plain)


def test_rows_are_packed_early_where_the_most_there_could_be_are_few(monkeypatch):
    case = Routed.random(9, 4, ExpertPlacement.linear(8, 3))

    def call():
        plan = case.plan()
        columns = [torch.randn(9, 16, generator=torch.Generator().manual_seed(0)), torch.ones(9, 4), plan.entries]
        form = RowFormat.of(columns)
        rows, early = int(plan.codes[0].sum()), row_plan.pack_early(plan, form, columns)
        if early is None:
            return None
        assert early.shape == (9 * 3, form.row_bytes)
        late = form.views(row_plan.pack_rows(plan, form, columns, rows))
        return [(a, b) for a, b in zip(form.views(early[:rows]), late, strict=True)]

    assert in_form("torch", call) is None
    for early, late in in_form("triton", call):
        assert torch.equal(early, late)
    monkeypatch.setattr(row_plan, "EARLY_BYTES", 9 * 3 * 96 - 1)  # a row is 96 bytes
    assert in_form("triton", call) is None


def test_no_other_row_is_written():
    slots = torch.tensor([[3, -1], [-1, -1], [2, 5]], dtype=torch.int32)  # not row 0, where a slot of -1 would write
    columns = [torch.ones(3, 8), torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int32)]
    form = RowFormat.of(columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "empty", lambda shape, dtype, device: torch.full(shape, UNTOUCHED, dtype=dtype, device=device)
        )
        wire = sent_rows.pack_rows(columns, form.starts, form.row_bytes, slots, 7)
    written = (wire != UNTOUCHED).any(1)
    assert written.tolist() == [False, False, True, True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("topk", [1, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_ids_on_arrival(rows, topk, dtype):
    placement = ExpertPlacement.of([0, 1, -1, 1, 0], 2)
    wide = torch.randint(0, 7, (rows, topk + 5), generator=torch.Generator().manual_seed(rows), dtype=dtype)
    index, table = wide[:, 2 : 2 + topk], row_plan.own_ids(placement, 1, dtype, wide.device)
    mine, plain = (in_form(form, lambda: row_plan.look_up(index, table)) for form in ("triton", "torch"))
    assert torch.equal(mine, plain)
    assert mine.dtype == dtype
    assert mine.is_contiguous()


def test_an_entry_outside_the_table_is_no_id():
    table = torch.tensor([-1, 7, 8, -1], dtype=torch.int32)
    index = torch.tensor([[-5, 4, 2], [1 << 30, -(1 << 31), 1]], dtype=torch.int32)
    assert sent_rows.look_up(index, table).tolist() == [[-1, -1, 8], [-1, -1, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 16, 19])
def test_sums_at_home(tokens, dtype):
    """NaN in every row that no token has."""
    case = Routed.random(tokens, 3, ExpertPlacement.linear(6, 4), seed=2)
    slots = in_form("torch", case.plan).slots
    used = slots[slots >= 0].long()
    rows = used.numel() + 3
    y = torch.full((rows, 40), float("nan")).to(dtype)
    y[used] = torch.randint(-9, 9, (used.numel(), 40), generator=torch.Generator().manual_seed(1)).to(dtype)
    mine, plain = (in_form(form, lambda: row_plan.sum_rows(y, slots)) for form in ("triton", "torch"))
    assert torch.equal(mine, plain)
    none = torch.full((4, 3), -1, dtype=torch.int32)
    assert in_form("triton", lambda: row_plan.sum_rows(y[:0], none)).tolist() == [[0.0] * 40] * 4


@pytest.mark.parametrize("sizes", [[5], [4, 0, 7], [1, 1], [0, 0]], ids=str)
@pytest.mark.parametrize("scales", [False, True], ids=["plain", "scales"])
def test_whole_layers_are_those_of_plain_torch(sizes, scales):
    """Ranks one after another, their rows moved between them here: what arrives and what comes home."""
    mine, plain = (in_form(form, lambda: whole_layer(sizes, scales)) for form in ("triton", "torch"))
    assert len(mine) == len(plain) > 0
    for found, wanted in zip(mine, plain, strict=True):
        assert torch.equal(found, wanted)


def test_wrong_operands_are_named():
    ids, owners = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ShapeError, match="topk_ids"):
        sent_rows.plan_rows(ids.float(), owners, 2)
    with pytest.raises(ShapeError, match="owners"):
        sent_rows.plan_rows(ids, owners.long(), 2)
    x, slots = torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="columns"):
        sent_rows.pack_rows([x, x], [0, 32], 64, slots, 4)
    with pytest.raises(ShapeError, match="columns"):
        sent_rows.pack_rows([x, x, x[:3]], [0, 32, 64], 96, slots, 4)
    with pytest.raises(ShapeError, match="slots"):
        sent_rows.pack_rows([x, x, x], [0, 32, 64], 96, slots.long(), 4)
    with pytest.raises(ShapeError, match="index"):
        sent_rows.look_up(ids, owners.long())
    with pytest.raises(ShapeError, match="index"):
        sent_rows.look_up(ids.float(), owners.float())
