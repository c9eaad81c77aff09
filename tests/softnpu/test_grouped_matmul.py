"""npu_grouped_matmul: types of group_list, one and several tensors, bias, int8."""

import pytest
import torch
import torch_npu
from aclnn import aclnn

SIZES = [3, 0, 5, 1]
E, K, N = len(SIZES), 12, 10


def group_list(kind: int, sizes: list[int] = SIZES) -> torch.Tensor:
    counts = torch.tensor(sizes)
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    pairs = [[e, n] for e, n in enumerate(sizes) if n]
    return torch.tensor(pairs + [[e, 0] for e, n in enumerate(sizes) if not n])


def reference(x, weights, bias, sizes=SIZES):
    """Rows of group e times weight e, in float64; NaN for the rows of no group."""
    y = torch.full((x.shape[0], weights[0].shape[1]), float("nan"), dtype=torch.float64)
    start = 0
    for e, size in enumerate(sizes):
        rows = x[start : start + size].double() @ weights[e].double()
        y[start : start + size] = rows if bias is None else rows + bias[e].double()
        start += size
    return y


def npu(tensors):
    return [t.npu() for t in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("layout", ["one weight", "transposed", "list of weights"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_groups_of_rows(dtype, kind, layout, with_bias):
    x, w = torch.randn(sum(SIZES) + 2, K).to(dtype), torch.randn(E, K, N).to(dtype)
    bias = torch.randn(E, N).to(torch.float16 if dtype == torch.float16 else torch.float32) if with_bias else None
    if layout == "list of weights":
        weight, biases = npu(w.unbind()), None if bias is None else npu(bias.unbind())
    else:
        device_w = w.npu() if layout == "one weight" else w.transpose(1, 2).contiguous().npu().transpose(1, 2)
        weight, biases = [device_w], None if bias is None else npu([bias])
    (y,) = torch_npu.npu_grouped_matmul(
        npu([x]),
        weight,
        bias=biases,
        group_list=group_list(kind).npu(),
        split_item=2,
        group_type=0,
        group_list_type=kind,
    )
    wanted = reference(x, w, bias).to(dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu()[:-2], wanted[:-2])
    assert y[-2:].isnan().all()


@pytest.mark.parametrize("sizes", [[9, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]], ids=str)
def test_all_to_one_and_none(sizes):
    x, w = torch.randn(9, K).bfloat16(), torch.randn(E, K, N).bfloat16()
    groups = group_list(1, sizes).npu()
    (y,) = torch_npu.npu_grouped_matmul(
        npu([x]), npu([w]), group_list=groups, split_item=3, group_type=0, group_list_type=1
    )
    torch.testing.assert_close(y.cpu(), reference(x, w, None, sizes).bfloat16(), equal_nan=True)


def test_no_rows():
    w = torch.randn(E, K, N).bfloat16()
    groups = torch.zeros(E, dtype=torch.int64).npu()
    (y,) = torch_npu.npu_grouped_matmul(
        npu([torch.empty(0, K).bfloat16()]), npu([w]), group_list=groups, split_item=2, group_type=0, group_list_type=1
    )
    assert y.shape == (0, N)


def test_lists_of_everything():
    xs = [torch.randn(m, k).half() for m, k in ((3, 4), (1, 6), (5, 2))]
    ws = [torch.randn(k, n).half() for k, n in ((4, 7), (6, 3), (2, 8))]
    bias = [torch.randn(w.shape[1]).half() for w in ws]
    ys = torch_npu.npu_grouped_matmul(npu(xs), npu(ws), bias=npu(bias), split_item=0, group_type=-1)
    for x, w, b, y in zip(xs, ws, bias, ys, strict=True):
        torch.testing.assert_close(y.cpu(), (x.double() @ w.double() + b.double()).half())


def test_several_x_one_output():
    xs, ws = [torch.randn(m, K).bfloat16() for m in (2, 4)], [torch.randn(K, N).bfloat16() for _ in range(2)]
    groups = torch.tensor([2, 4]).npu()
    (y,) = torch_npu.npu_grouped_matmul(
        npu(xs), npu(ws), group_list=groups, split_item=2, group_type=0, group_list_type=1
    )
    wanted = torch.cat([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)])
    torch.testing.assert_close(y.cpu(), wanted.bfloat16())


def test_groups_of_the_inner_dimension():
    """The gradient of the weights: x is a transposed view, one product per group of its columns."""
    sizes = [3, 4, 2]
    x, w = torch.randn(9, 5).bfloat16(), torch.randn(9, N).bfloat16()
    groups = torch.tensor(sizes).cumsum(0).npu()
    (y,) = torch_npu.npu_grouped_matmul([x.npu().t()], npu([w]), group_list=groups, split_item=3, group_type=2)
    parts = zip(x.split(sizes), w.split(sizes), strict=True)
    torch.testing.assert_close(y.cpu(), torch.stack([a.double().t() @ b.double() for a, b in parts]).bfloat16())


def test_key_value_counts_of_init_routing():
    """What init_routing does not write after the last pair is not read."""
    x, w, ids = (
        torch.randn(6, K).bfloat16(),
        torch.randn(64, K, N).bfloat16(),
        torch.tensor([[7], [9], [7], [8], [9], [9]]),
    )
    rows, _, pairs, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        ids.int().npu(),
        active_num=6,
        expert_num=64,
        expert_tokens_num_type=2,
        expert_tokens_num_flag=True,
        active_expert_range=[7, 10],
    )
    assert pairs[4:].eq(pairs[5, 0]).all()  # the mark of what is not written
    (y,) = torch_npu.npu_grouped_matmul(
        [rows], npu([w]), group_list=pairs, split_item=2, group_type=0, group_list_type=2
    )
    order = [0, 2, 3, 1, 4, 5]
    wanted = torch.stack([x[t].double() @ w[ids[t, 0]].double() for t in order])
    torch.testing.assert_close(y.cpu(), wanted.bfloat16())


def test_version_4():
    x, w, y = torch.randn(9, K).half(), torch.randn(E, K, N).half(), torch.empty(9, N).half().npu()
    absent = [None] * 6
    groups = group_list(1).npu()
    aclnn("aclnnGroupedMatmulV4", npu([x]), npu([w]), *absent, groups, None, None, None, 2, 0, 1, 0, [y], None, None)
    torch.testing.assert_close(y.cpu(), reference(x, w, None).half())


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("act_type", [0, 5])
def test_int8(dtype, per_token, with_bias, act_type):
    rows = sum(SIZES) + 1
    x, w = int8(rows, K), int8(E, K, N)
    scale = (torch.rand(E, N) * 1e-4).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    token_scale = torch.rand(rows)
    bias = torch.randint(-1000, 1000, (E, N), dtype=torch.int32) if with_bias else None
    (y,) = torch_npu.npu_grouped_matmul(
        npu([x]),
        npu([w]),
        bias=npu([bias]) if with_bias else None,
        scale=npu([scale]),
        per_token_scale=npu([token_scale]) if per_token else None,
        group_list=group_list(1).npu(),
        split_item=2,
        group_type=0,
        group_list_type=1,
        act_type=act_type,
        output_dtype=dtype,
    )
    column = torch.repeat_interleave(scale.double(), torch.tensor(SIZES), 0)
    wanted = reference(x, w, bias)[:-1] * column
    if per_token:
        wanted = wanted * token_scale[:-1, None].double()
    if act_type == 5:
        wanted = wanted * wanted.sigmoid()
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu()[:-1], wanted.to(dtype))
    assert y[-1].isnan().all()


def test_int8_without_scale_is_exact():
    x, w = int8(sum(SIZES), 300), int8(E, 300, N)
    (y,) = torch_npu.npu_grouped_matmul(
        npu([x]), npu([w]), group_list=group_list(0).npu(), split_item=2, group_type=0, output_dtype=torch.int32
    )
    assert y.dtype == torch.int32
    assert torch.equal(y.cpu().double(), reference(x, w, None))


def call(**changed):
    arguments = {"x": torch.randn(9, K), "weight": torch.randn(E, K, N), "group_list": group_list(1), **changed}
    x, weight = arguments.pop("x").npu(), arguments.pop("weight").npu()
    arguments["group_list"] = arguments["group_list"].npu()
    if "bias" in arguments:
        arguments["bias"] = npu(arguments["bias"])
    if "scale" in arguments:
        arguments["scale"] = npu(arguments["scale"])
    kwargs = {"split_item": 2, "group_type": 0, "group_list_type": 1, **arguments}
    torch_npu.npu_grouped_matmul([x], [weight], **kwargs)
    torch.npu.synchronize()


REFUSED = {
    r"rows \[8, 10\) of 9": {"group_list": torch.tensor([3, 0, 5, 2])},
    r"rows \[3, 2\) of 9": {"group_list": torch.tensor([3, 2, 5, 9]), "group_list_type": 0},
    "there are 4 weights": {"group_list": torch.tensor([3, 2])},
    "type of weight = Char with x of BFloat16 is not emulated": {
        "x": torch.randn(9, K).bfloat16(),
        "weight": int8(E, K, N),
    },
    "bias is BFloat16": {
        "x": torch.randn(9, K).bfloat16(),
        "weight": torch.randn(E, K, N).bfloat16(),
        "bias": [torch.randn(E, N).bfloat16()],
    },
    "act_type = 5": {"act_type": 5},
    "do not fit": {"weight": torch.randn(E, K + 1, N)},
    "scale or per_token_scale": {"scale": [torch.ones(E, N)]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_argument(message):
    with pytest.raises(RuntimeError, match=f"aclnnGroupedMatmulV5.*{message}"):
        call(**REFUSED[message])
