"""vllm-ascend's own operators of quantised experts, and a few more, against loops over rows in float64."""

import pytest
import torch

DEQUANT = (
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
    "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
    "bool activate_left=True, int quant_mode=0, int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, "
    "float glu_bias=0.0) -> (Tensor y, Tensor scale)"
)
PRODUCT = (
    "(Tensor x, Tensor{0} weight, Tensor{0} weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None, "
    "Tensor? offset=None, float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale, Tensor output_offset)"
)
SCHEMAS = [
    DEQUANT,
    "grouped_matmul_swiglu_quant_weight_nz" + PRODUCT.format(""),
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list" + PRODUCT.format("[]"),
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index, int "
    "num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) -> (Tensor masked_input, Tensor m)",
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor tensor_c, str? format_mode=None, "
    "str? quant_mode=None) -> ()",
]
M, N, E, K = 11, 6, 4, 9  # rows, columns of a half, experts, inner
COUNTS = [3, 0, 6, 1]  # one expert has nothing, and one row belongs to none


@pytest.fixture(scope="module")
def ops():
    """As vllm-ascend defines them, after the soft NPU has registered their kernels."""
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    yield torch.ops._C_ascend
    library._destroy()


def experts_of_rows() -> list[int]:
    return [e for e, count in enumerate(COUNTS) for _ in range(count)]


def swiglu(row, *, left=True, mode=0, limit=0.0, alpha=1.0, bias=0.0):
    """One row, float64 [2 N]."""
    act, gate = (row[:N], row[N:]) if left else (row[N:], row[:N])
    if mode == 0:
        return act / (1 + (-act).exp()) * gate
    if limit > 0:
        act, gate = act.clamp(max=limit), gate.clamp(-limit, limit)
    return act / (1 + (-alpha * act).exp()) * (gate + bias)


def check_row(row, values, scale):
    """Nearest integers, up to what float32 rounds differently."""
    torch.testing.assert_close(scale.double(), row.abs().max() / 127, rtol=1e-5, atol=1e-12)
    assert ((values.double() - 127 * row / row.abs().max().clamp(min=1e-30)).abs() < 0.5 + 1e-3).all()


def check_unwritten(values, scales, rows):
    assert (values[rows:] == -86).all()
    assert scales[rows:].isnan().all()


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("form", [{}, {"left": False}, {"mode": 1, "limit": 3.0, "alpha": 1.7, "bias": 0.5}])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_dequant_swiglu_quant(ops, dtype, form, grouped, smooth):
    x = torch.randint(-90, 90, (M, 2 * N), dtype=torch.int32) if dtype == torch.int32 else torch.randn(M, 2 * N) * 3
    x = x.to(dtype)
    x[1] = 0
    groups = E if grouped else 1
    weight_scale, row_scale = torch.rand(groups, 2 * N) / 10, torch.rand(M, 1)
    quant_scale = torch.rand(groups, N) + 0.5
    keywords = {"activate_left": form.get("left", True), "quant_mode": 1, "swiglu_mode": form.get("mode", 0)}
    keywords |= {f"{n}": form.get(k, d) for n, k, d in [("clamp_limit", "limit", 0.0), ("glu_alpha", "alpha", 1.0)]}
    keywords["glu_bias"] = form.get("bias", 0.0)
    if dtype == torch.int32:
        keywords |= {"weight_scale": weight_scale.npu(), "activation_scale": row_scale.npu()}
    if grouped:
        keywords["group_index"] = torch.tensor(COUNTS).npu()
    if smooth:
        keywords["quant_scale"] = quant_scale.npu()
    y, scale = (t.cpu() for t in ops.npu_dequant_swiglu_quant(x.npu(), **keywords))
    experts = experts_of_rows() if grouped else [0] * M
    for i, e in enumerate(experts):
        row = x[i].double()
        if dtype == torch.int32:
            row = row * weight_scale[e].double() * row_scale[i].double()
        row = swiglu(row, **form)
        check_row(row * quant_scale[e].double() if smooth else row, y[i], scale[i])
    check_unwritten(y, scale, len(experts))


@pytest.mark.parametrize("as_list", [False, True])
def test_grouped_matmul_swiglu_quant(ops, as_list):
    x, weight = torch.randint(-127, 127, (M, K), dtype=torch.int8), torch.randint(-9, 9, (E, K, 2 * N)).to(torch.int8)
    weight_scale, x_scale, ends = torch.rand(E, 2 * N) / 50, torch.rand(M) + 0.1, torch.tensor(COUNTS).cumsum(0)
    given = weight.npu(), weight_scale.npu()
    if as_list:
        given = [w.npu() for w in weight], [s.npu() for s in weight_scale]
    name = "grouped_matmul_swiglu_quant_weight_nz" + ("_tensor_list" if as_list else "")
    y, scale, offset = getattr(ops, name)(x.npu(), *given, x_scale.npu(), ends.npu())
    assert offset.shape == ((M,) if as_list else ())
    experts = experts_of_rows()
    for i, e in enumerate(experts):
        row = (x[i].double() @ weight[e].double()) * weight_scale[e].double() * x_scale[i].double()
        check_row(swiglu(row), y[i].cpu(), scale[i].cpu())
    check_unwritten(y.cpu(), scale.cpu(), len(experts))


def test_they_are_captured_in_graphs(ops):
    x = torch.zeros(2, 2 * N).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y, scale = ops.npu_dequant_swiglu_quant(x, quant_mode=1)
    fresh = torch.randn(2, 2 * N)
    x.copy_(fresh)
    graph.replay()
    for i in range(2):
        check_row(swiglu(fresh[i].double()), y[i].cpu(), scale[i].cpu())


def test_refusals(ops):
    x, ones = torch.ones(2, 2 * N, dtype=torch.int32).npu(), torch.ones(2 * N).npu()
    for message, keywords in {
        "quant_mode = 0 is not emulated, only 1; add it to": {"quant_mode": 0, "weight_scale": ones},
        r"bias = \(not None\) is not emulated": {"quant_mode": 1, "weight_scale": ones, "bias": ones},
        "int32 needs weight_scale": {"quant_mode": 1},
        r"weight_scale \(2, 12\); wanted": {"quant_mode": 1, "weight_scale": ones.expand(2, -1).contiguous()},
        "group_index adds up to 5, x has 2 rows": {
            "quant_mode": 1,
            "weight_scale": ones,
            "group_index": torch.tensor([5]).npu(),
        },
    }.items():
        with pytest.raises((RuntimeError, ValueError), match=message):
            ops.npu_dequant_swiglu_quant(x, **keywords)
    bad = x.char(), torch.ones(1, 2 * N, 2 * N).char().npu(), torch.ones(1, 2 * N).npu(), torch.ones(2).npu()
    product = ops.grouped_matmul_swiglu_quant_weight_nz
    with pytest.raises(NotImplementedError, match=r"swiglu_limit = 7.0 is not emulated"):
        product(*bad, torch.tensor([2]).npu(), swiglu_limit=7.0)
    with pytest.raises(ValueError, match=r"group_list \[3\]"):
        product(*bad, torch.tensor([3]).npu())
    with pytest.raises(NotImplementedError, match="only int8 is emulated"):
        product(x, *bad[1:], torch.tensor([2]).npu())


def test_masked_input(ops):
    ids = torch.tensor([[3, 9, 10], [19, 20, 40], [43, 44, 0]], dtype=torch.int32)
    rows, mask = ops.get_masked_input_and_mask(ids.npu(), 10, 20, 2, 40, 44)
    # Rows 0 to 9 are ids 10 to 19, two are padding, and 12 to 15 are ids 40 to 43.
    assert rows.tolist() == [[0, 0, 0], [9, 0, 12], [15, 0, 0]]
    assert mask.tolist() == [[True, True, False], [False, True, False], [False, True, True]]
    assert rows.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_matmul_transpose(ops, dtype):
    a, b = torch.randn(5, 3, 8).to(dtype), torch.randn(3, 8, 4).to(dtype)
    c = torch.full((5, 3, 4), float("nan"), dtype=dtype).npu()
    ops.batch_matmul_transpose(a.npu(), b.npu(), c)
    for m in range(3):
        wanted = (a[:, m].double() @ b[m].double()).to(dtype)
        torch.testing.assert_close(c.cpu()[:, m], wanted, rtol=0.02, atol=0.02)
    with pytest.raises(NotImplementedError, match="format_mode = NZ"):
        ops.batch_matmul_transpose(a.npu(), b.npu(), c, "NZ")
    with pytest.raises(ValueError, match="do not fit"):
        ops.batch_matmul_transpose(a.npu(), b.npu(), c[:, :2])
