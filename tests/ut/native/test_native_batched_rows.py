"""The native rows of the batched strategy against plain torch: plan, scatter, weighted sum; checks; opcheck."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_ascend_moe.comm import batched_rows
from vllm_ascend_moe.experts.native import NativeExperts
from vllm_ascend_moe.experts.torch_form import TorchExperts
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal

pytestmark = pytest.mark.skipif(not native_available(), reason="the native extension is not built")
NAN = float("nan")


def both(monkeypatch, call):
    results = []
    for form in ("native", "torch"):
        monkeypatch.setattr(batched_rows, "form_on", lambda device_type, form=form: form)
        results.append(call())
    return results


def plan_of(rows, top_k, experts, local, id_dtype=torch.int32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (rows, top_k), generator=generator, dtype=id_dtype)
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(experts, generator=generator)[:local]] = torch.arange(local, dtype=torch.int32)
    return batched_rows.plan_slots(ids, batched_rows.slot_table(expert_map, local), local)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("rows", "top_k", "experts", "local"), [(1, 1, 1, 0), (7, 3, 5, 2), (400, 8, 64, 16)])
def test_plans_are_the_same(rows, top_k, experts, local, id_dtype, monkeypatch):
    native, plain = both(monkeypatch, lambda: plan_of(rows, top_k, experts, local, id_dtype))
    for a, b in zip(native, plain, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (300,), (2, 3)], ids=str)
def test_rows_are_copied_to_their_slots_and_nowhere_else(dtype, shape, monkeypatch):
    """Rows of a wider buffer, as the gather gives them; threads share 400 rows."""
    rows, local = 400, 4

    def call():
        slots, _ = plan_of(rows, 6, 12, local)
        wide = torch.randint(0, 100, (rows, 2, *shape), generator=torch.Generator().manual_seed(1)).to(dtype)
        out = torch.full((local * rows + 1, *shape), 7).to(dtype)
        batched_rows.scatter_rows(wide[:, 0], slots, out)
        return slots, out[:-1].float(), wide[:, 0].float()

    (slots, native, x), (_, plain, _) = both(monkeypatch, call)
    assert_equal(native, plain)
    written = slots[slots >= 0].long()
    source = torch.arange(rows)[:, None].expand(slots.shape)[slots >= 0]
    assert_equal(native[written], x[source])
    kept = torch.ones(local * rows, dtype=torch.bool)
    kept[written] = False
    assert (native[kept] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 1100])
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_are_bit_for_bit_those_of_plain_torch(dtype, hidden, weighted, monkeypatch):
    """The product rounded, then the sum, in order of k; slots and weights of no choice hold NaN."""
    rows, local = 60, 4
    generator = torch.Generator().manual_seed(2)

    def call():
        slots, _ = plan_of(rows, 6, 12, local)
        y = torch.full((local * rows, hidden), NAN, dtype=dtype)
        used = slots[slots >= 0].unique().long()  # a row that names an expert twice has one slot: no two writes to it
        y[used] = torch.randn(len(used), hidden, generator=generator.manual_seed(2)).to(dtype)
        weights = torch.rand(rows, 12, generator=generator)[:, ::2]  # strided, as a column of a gathered row
        weights[slots < 0] = NAN
        outs = []
        for out_dtype in (dtype, torch.float32):
            out = torch.full((rows, hidden + 3), NAN, dtype=out_dtype)[:, :hidden]
            batched_rows.sum_slots(y, slots, weights if weighted else None, out)
            outs.append(out)
        return outs

    native, plain = both(monkeypatch, call)
    for a, b in zip(native, plain, strict=True):
        assert_equal(a, b)
    assert_equal(native[0], native[1].to(dtype))


def test_wrong_operands_are_refused():
    ops, slots = torch.ops.ascend_moe, torch.tensor([[0], [9]], dtype=torch.int32)
    x, out = torch.zeros(2, 4), torch.zeros(3, 4)
    with pytest.raises(IndexError, match="slot 9 of 3 rows"):
        ops.scatter_rows(x, slots, out)
    with pytest.raises(IndexError, match="slot 9 of 3 rows"):
        ops.sum_slots(out, slots, None, x)
    good = torch.zeros_like(slots)
    with pytest.raises(ValueError, match="do not fit"):
        ops.scatter_rows(x, good, torch.zeros(3, 5))
    with pytest.raises(TypeError, match="one dtype"):
        ops.scatter_rows(x, good, out.half())
    with pytest.raises(ValueError, match="not contiguous"):
        ops.scatter_rows(torch.zeros(2, 8)[:, ::2], good, out)
    with pytest.raises(ValueError, match="slots"):
        ops.scatter_rows(x, good[:1], out)
    with pytest.raises(TypeError, match="slots must be int32"):
        ops.sum_slots(out, good.long(), None, x)
    with pytest.raises(TypeError, match="float32"):
        ops.sum_slots(out, good, torch.zeros(2, 1).half(), x)
    with pytest.raises(ValueError, match="weights must be"):
        ops.sum_slots(out, good, torch.zeros(2, 2), x)
    with pytest.raises(TypeError, match="int32 or int64"):
        ops.plan_slots(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int32), 1)


def test_opcheck():
    ops, check = torch.ops.ascend_moe, torch.library.opcheck
    ids, expert_map = torch.tensor([[0, 2], [1, -1]]), torch.tensor([0, -1, 1], dtype=torch.int32)
    slots, _ = ops.plan_slots(ids, expert_map, 2)
    check(ops.plan_slots.default, (ids, expert_map, 2))
    check(ops.scatter_rows.default, (torch.randn(2, 4), slots, torch.zeros(5, 4)))
    check(ops.sum_slots.default, (torch.randn(4, 4), slots, torch.rand(2, 2), torch.zeros(2, 4)))


class Multiplied(TorchDispatchMode):
    """Counts the elements that torch multiplies."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor:
            self.elements += out.numel()
        return out


@pytest.mark.parametrize("payload", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_payload_costs_what_its_real_rows_cost(payload):
    """The buffer has 1000 rows an expert, of which 5 and 3 are real; the others hold NaN scales."""
    counts, weights = torch.tensor([5, 0, 3], dtype=torch.int32), data.expert_weights(0, range(3), 16, 16)
    hidden = torch.randint(-100, 100, (3, 1000, 16)).to(payload)
    scales = torch.rand(3, 1000).masked_fill(torch.arange(1000) >= counts[:, None], NAN)
    with Multiplied() as multiplied:
        out = NativeExperts().apply_batched(hidden, counts, weights, scales=scales)
    assert multiplied.elements == 8 * 16
    plain = TorchExperts().apply_batched(hidden, counts, weights, scales=scales)
    for expert, count in enumerate(counts.tolist()):
        assert out[expert, :count].isfinite().all()
        assert_close(out[expert, :count], plain[expert, :count])
