"""No shape of the batched strategy depends on data: it runs with tensors that have shapes and no values.

A step whose shapes or host code depended on values (`.item()`, `nonzero`, a mask) raises; two controls show that. Does
not prove that a device is never waited for otherwise; tests/e2e/cuda/test_batched_capture.py does.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_ascend_moe.comm import batched_rows
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.experts.torch_form import TorchExperts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data

H, K, E = 8, 4, 7


class ShapesOnly:
    """A group whose collectives have the right shapes: every rank holds what this one holds."""

    def __init__(self, rank, world_size):
        self.rank_in_group, self.world_size = rank, world_size

    def all_gather(self, x, dim):
        return torch.cat([x] * self.world_size)

    def all_to_all(self, x, output_splits=None, input_splits=None):
        return x.clone()


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor an operation gives."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen += [tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        return out


def run_without_values(step, tokens, dtype=torch.bfloat16):
    """What ``step(hidden, weights, ids, scales)`` returns, and the shapes of all tensors on the way."""
    # Without a shape environment, since that would give a name to what it does not know instead of raising.
    with FakeTensorMode(allow_non_fake_inputs=True), Shapes() as shapes:
        hidden, ids = torch.zeros(tokens, H, dtype=dtype), torch.zeros(tokens, K, dtype=torch.int32)
        out = step(hidden, torch.zeros(tokens, K), ids, torch.zeros(tokens))
    return out, shapes.seen


def layer(comm, sizes):
    """Dispatch, something as experts, combine."""
    layout = TokenLayout.of(sizes, comm.group.rank_in_group)
    comm._constants_on(torch.device("cpu"))  # as any step before does

    def step(hidden, weights, ids, scales):
        sent = comm.dispatch(hidden, weights, ids, num_experts=E, layout=layout, scales=scales)
        y = sent.hidden * sent.scales[..., None] + sent.expert_num_tokens[:, None, None]
        return comm.combine(y, sent.handle)

    return step


@pytest.mark.parametrize(
    "form", [pytest.param("native", marks=pytest.mark.skipif(not native_available(), reason="not built")), "torch"]
)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("sizes", [[5], [5, 0], [0, 3], [6, 6, 1]], ids=str)
def test_a_step_runs_without_values(form, exact, dtype, sizes, monkeypatch):
    monkeypatch.setattr(batched_rows, "form_on", lambda device_type: form)
    for rank in range(len(sizes)):
        comm = BatchedAllToAll(ShapesOnly(rank, len(sizes)), ExpertPlacement.linear(E, len(sizes)), 6, exact=exact)
        out, _ = run_without_values(layer(comm, sizes), sizes[rank], dtype)
        assert out.shape == (sizes[rank], H)


def test_shapes_follow_capacity_and_not_token_counts(monkeypatch):
    """Every tensor has the same shape for any counts, but for tokens given and given back, and pad."""
    monkeypatch.setattr(batched_rows, "form_on", lambda device_type: "torch")

    def shapes(tokens):
        comm = BatchedAllToAll(ShapesOnly(0, 2), ExpertPlacement.linear(E, 2), 23)
        _, seen = run_without_values(layer(comm, [tokens, 9]), tokens)
        return [shape for shape in seen if not {tokens, 23 - tokens} & set(shape)]

    few, many = shapes(10), shapes(17)
    assert few == many
    assert few.count((4, 2 * 23, H)) > 0  # [E_l, C*R, H]
    assert len(few) > 30


def test_the_check_sees_shapes_and_host_code_that_depend_on_values():
    """Controls: experts that read counts on the host, and a mask."""
    comm, layout = BatchedAllToAll(ShapesOnly(0, 2), ExpertPlacement.linear(E, 2), 6), TokenLayout.of([3, 3], 0)
    weights = data.expert_weights(0, range(4), H, 4)

    def with_experts_on_the_host(hidden, weight, ids, scales):
        sent = comm.dispatch(hidden, weight, ids, num_experts=E, layout=layout)
        return TorchExperts().apply_batched(sent.hidden, sent.expert_num_tokens, weights)

    def masked(hidden, weight, ids, scales):
        return hidden[ids[:, 0] >= 0]

    for step in (with_experts_on_the_host, masked):
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            run_without_values(step, 3)
