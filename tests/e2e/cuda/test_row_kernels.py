"""The kernels of the all-to-all by row, compiled, against plain torch on the same GPU, bit for bit; launches.

On a machine with a GPU: pytest tests/e2e/cuda/test_row_kernels.py
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[3])]

from tests.row_cases import HARD, Routed, in_form, whole_layer  # noqa: E402
from vllm_ascend_moe.comm import row_plan  # noqa: E402
from vllm_ascend_moe.ops.row_bytes import RowFormat  # noqa: E402
from vllm_ascend_moe.placement import ExpertPlacement  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; see the module's docstring"),
]


def assert_same_layers(case, hidden_size=64, dtype=torch.bfloat16, scales=None):
    """Twice, so that the cached launch is compared too: the plan, rows of bytes, ids looked up, sums at home."""

    def call():
        plan = case.plan(code=14400 << 32)
        counts = plan.codes[0] - (14400 << 32)
        columns = case.columns(dtype, hidden_size, scales)
        columns.insert(2, plan.entries)
        form = RowFormat.of(columns)
        wire = row_plan.pack_rows(plan, form, columns, int(counts.sum()))
        views = form.views(wire)
        table = row_plan.own_ids(case.placement, 0, case.ids.dtype, case.ids.device)
        found = [plan.entries, counts, plan.slots, *views, row_plan.look_up(views[2], table)]
        return [*found, row_plan.sum_rows(views[0].contiguous(), plan.slots)]

    plain = in_form("torch", call)
    for _ in range(2):
        for place, (mine, wanted) in enumerate(zip(in_form("triton", call), plain, strict=True)):
            assert mine.dtype == wanted.dtype, place
            assert torch.equal(mine, wanted), place


@pytest.mark.parametrize("name", HARD)
def test_hard_plans(name):
    case = HARD[name]()
    assert_same_layers(Routed(case.ids.cuda(), case.placement))


@pytest.mark.parametrize(
    ("tokens", "topk", "ranks"),
    [(1, 8, 8), (17, 8, 8), (512, 8, 2), (512, 8, 8), (4096, 8, 8), (8192, 8, 8), (8192, 6, 2), (5000, 7, 33),
     (65536, 8, 16), (30000, 4, 256), (700, 32, 256)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_many_tokens(tokens, topk, ranks, dtype):
    """One launch and two, one tile and many for each program."""
    placement = ExpertPlacement.linear(512, ranks)
    assert_same_layers(Routed.random(tokens, topk, placement, dtype, seed=tokens, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scales", [None, (), (56,), (2, 3)], ids=str)
@pytest.mark.parametrize("hidden_size", [1, 7, 70, 7168])
def test_rows_of_bytes(dtype, scales, hidden_size):
    case = Routed.random(130, 3, ExpertPlacement.linear(6, 4), seed=hidden_size, device="cuda")
    columns = case.columns(torch.float32 if dtype.itemsize == 1 else dtype, hidden_size, scales)
    columns[0] = columns[0].to(dtype)

    def call(raw=False):
        if raw:  # torch does not select rows of every 8-bit type
            columns[0] = columns[0].view(torch.int8)
        plan = case.plan()
        given = [*columns[:2], plan.entries, *columns[2:]]
        form = RowFormat.of(given)
        rows = int(plan.codes[0].sum())
        early = row_plan.pack_early(plan, form, given)
        return form.views(row_plan.pack_rows(plan, form, given, rows) if early is None else early[:rows])

    found = in_form("triton", call)
    for mine, wanted in zip(found, in_form("torch", lambda: call(raw=dtype.itemsize == 1)), strict=True):
        assert torch.equal(mine.view(wanted.dtype), wanted)


@pytest.mark.parametrize("sizes", [[5], [400, 0, 700], [1, 1], [0, 0]], ids=str)
def test_whole_layers(sizes):
    mine, plain = (in_form(form, lambda: whole_layer(sizes, True, "cuda")) for form in ("triton", "torch"))
    for found, wanted in zip(mine, plain, strict=True):
        assert torch.equal(found, wanted)


def test_a_plan_is_one_launch_and_few_tokens_more_compile_nothing():
    """Kernels as CUDA's tracer counts them; tokens are not specialised, so all small numbers run the same code."""
    from torch.profiler import ProfilerActivity, profile

    from vllm_ascend_moe.kernels import cached_launch

    placement = ExpertPlacement.linear(64, 8)
    Routed.random(512, 8, placement, device="cuda").plan()
    known = len(cached_launch._compiled)
    for tokens in (511, 100, 65):
        Routed.random(tokens, 8, placement, device="cuda").plan()
    assert len(cached_launch._compiled) == known > 0
    case = Routed.random(512, 8, placement, device="cuda")
    owners = row_plan.owner_table(placement, case.ids.device)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        row_plan.plan_rows(case.ids, owners, 8)
        torch.cuda.synchronize()
    kernels = [e.key for e in trace.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["row_plan_kernel"]
