"""The native form of the all-to-all by row against plain torch, which is its specification; its errors; opcheck."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.comm import row_plan
from vllm_ascend_moe.ops import row_bytes
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.ops.row_bytes import RowFormat
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing.compare import assert_equal

pytestmark = pytest.mark.skipif(not native_available(), reason="the native extension is not built")
OPS = torch.ops.ascend_moe


def in_both_forms(call):
    """Results of the native and of the plain form."""
    results = []
    for native in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_plan, "form_on", lambda device, native=native: "native" if native else "torch")
            patch.setattr(row_bytes, "native_available", lambda native=native: native)
            results.append(call())
    return results


@given(st.data())
def test_plans_rows_and_ids_are_the_same(drawn):
    ranks = drawn.draw(st.integers(1, 6), label="R")
    placement = ExpertPlacement.of(drawn.draw(st.lists(st.integers(-1, ranks - 1), min_size=1, max_size=12)), ranks)
    tokens, top_k = drawn.draw(st.integers(0, 9), label="T"), drawn.draw(st.integers(0, 6), label="K")
    dtype = drawn.draw(st.sampled_from([torch.int32, torch.int64]))
    any_id = st.integers(-3, placement.num_experts + 2) | st.sampled_from([-(2**31), 2**31 - 1])
    drawn_ids = drawn.draw(st.lists(any_id, min_size=tokens * top_k, max_size=tokens * top_k), label="ids")
    ids = torch.tensor(drawn_ids, dtype=dtype).view(tokens, top_k)
    if drawn.draw(st.booleans(), label="strided") and top_k:
        ids = ids.repeat_interleave(2, 1)[:, ::2]
    hidden = torch.arange(tokens * 3.0).view(tokens, 3).bfloat16()

    def call():
        plan = row_plan.plan_rows(ids, row_plan.owner_table(placement, ids.device), ranks)
        sources = plan.sources(int(plan.codes[0].sum()))
        columns = [hidden, plan.entries, hidden[:, 0]]
        form = RowFormat.of(columns)
        views = form.views(form.select(columns, sources))
        mine = row_plan.look_up(views[1], row_plan.own_ids(placement, ranks - 1, dtype, ids.device))
        return plan.entries, plan.codes[0], plan.slots, sources, *views, mine

    for native, plain in zip(*in_both_forms(call), strict=True):
        assert_equal(native, plain)
        assert native.stride() == plain.stride() or native.numel() < 2 or 1 in native.shape


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (700,), (2, 3)], ids=str)
def test_rows_of_bytes_are_read_back_in_place(dtype, shape):
    """Threads share 4000 rows; a strided tensor beside a dense one."""
    wide = torch.randint(0, 100, (300, 2, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    columns = [wide[:, 1], torch.arange(300.0)]
    sources = torch.randint(0, 300, (4000,), generator=torch.Generator().manual_seed(1))

    def call():
        form = RowFormat.of(columns)
        wire = form.select(columns, sources)
        assert wire.shape == (4000, form.row_bytes)
        return form.views(wire)

    for x, native, plain in zip(columns, *in_both_forms(call), strict=True):
        assert native.dtype == plain.dtype == x.dtype
        assert torch.equal(native.double(), x.double()[sources])
        assert torch.equal(plain.double(), x.double()[sources])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param(lambda: OPS.plan_rows(torch.zeros(2, 2), torch.zeros(4).long(), 2), TypeError, id="float ids"),
        pytest.param(lambda: OPS.plan_rows(torch.zeros(2).int(), torch.zeros(4).long(), 2), ValueError, id="1-D ids"),
        pytest.param(lambda: OPS.plan_rows(torch.zeros(2, 2).int(), torch.zeros(4), 2), TypeError, id="float owners"),
        pytest.param(
            lambda: OPS.look_up(torch.full((1, 1), 4), torch.zeros(4).long()), IndexError, id="past the table"
        ),
        pytest.param(lambda: OPS.look_up(torch.full((1, 1), -1), torch.zeros(4).long()), IndexError, id="before it"),
        pytest.param(lambda: OPS.look_up(torch.zeros(1, 1).int(), torch.zeros(4).long()), TypeError, id="two types"),
        pytest.param(
            lambda: OPS.pack_rows([torch.zeros(2, 4)], torch.tensor([2]), [0], 16), IndexError, id="no such row"
        ),
        pytest.param(
            lambda: OPS.pack_rows([torch.zeros(2, 4)], torch.tensor([0]), [4], 16), ValueError, id="past the row"
        ),
        pytest.param(
            lambda: OPS.pack_rows([torch.zeros(2, 4)], torch.empty(0).long(), [2**63 - 1], 16),
            ValueError,
            id="so far past the row that the sum overflows",
        ),
        pytest.param(lambda: OPS.pack_rows([], torch.tensor([0]), [], 16), ValueError, id="nothing to pack"),
    ],
)
def test_wrong_arguments_are_errors_and_not_crashes(call, error):
    with pytest.raises(error):
        call()


def test_opcheck():
    tests = ("test_schema", "test_autograd_registration")  # shapes depend on values: there is no shape-only form
    ids = torch.tensor([[0, 3], [5, -1]], dtype=torch.int32)
    owners = row_plan.owner_table(ExpertPlacement.linear(4, 2), ids.device)
    torch.library.opcheck(OPS.plan_rows.default, (ids, owners, 2), test_utils=tests)
    torch.library.opcheck(OPS.look_up.default, (ids.clamp(min=0), torch.arange(6).int()), test_utils=tests)
    torch.library.opcheck(OPS.pack_rows.default, ([torch.ones(2, 4)], torch.tensor([1, 0]), [0], 16), test_utils=tests)
