"""The operators under torch.library.opcheck and torch.compile (inductor, fullgraph).

Proves, on two gloo processes, that a graph traced at one set of token counts is right at others: the other rank's
counts change while this rank's do not, ranks without tokens, M changing, with dynamic and with static shapes; and
that opcheck accepts both operators there and on one rank. Each rank is compared with its own eager run, which the
other tests prove right. Does not prove anything about vLLM's own compilation; the engine tests do.
"""

import compile_ranks
import pytest
import torch
import torch.distributed as dist
from ops_world import context, dp_metadata, layout_context, ops

from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.testing.compare import assert_equal
from vllm_ascend_moe.testing.launch import launch

GATHER, REDUCE = "maybe_all_gather_and_maybe_unpad", "maybe_pad_and_reduce"


@pytest.fixture(scope="module")
def reports():
    """What each of two ranks found; see compile_ranks."""
    return launch(2, compile_ranks.body, timeout_s=140)


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", compile_ranks.CASES)
def test_a_compiled_model_is_right_at_every_token_count(reports, case):
    assert [report["cases"][case]["wrong"] for report in reports] == [[], []]


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", [case for case in compile_ranks.CASES if "no metadata" not in case])
def test_counts_of_the_other_rank_do_not_compile_again(reports, case):
    """Rank 0 keeps its count while rank 1's changes, and M with it: one graph serves all, so no count is in it."""
    kept = compile_ranks.KEPT
    assert len({sizes[0] for sizes in compile_ranks.STEPS[:kept]}) == 1
    assert len({max(sizes) for sizes in compile_ranks.STEPS[:kept]}) == 3
    assert reports[0]["cases"][case]["graphs"][:kept] == [1] * kept


@pytest.mark.multiprocess
def test_opcheck_on_two_ranks(reports):
    assert [report["opcheck"] for report in reports] == [len(compile_ranks.OPCHECK_SIZES) * 8] * 2


@pytest.mark.multiprocess
def test_a_fresh_process_registers_once(reports):
    assert [report["registered"] for report in reports] == [(True, False)] * 2


ONE_RANK_INPUTS = pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.rand(3, 4), id="2-D"),
        pytest.param(torch.rand(3), id="1-D"),
        pytest.param(torch.rand(3, 2, 2, dtype=torch.bfloat16), id="3-D bf16"),
        pytest.param(torch.arange(3), id="1-D int64"),
        pytest.param(torch.rand(4, 3).t(), id="transposed"),
        pytest.param(torch.rand(3, 8)[:, ::2], id="x[:, ::2]"),
        pytest.param(torch.rand(0, 4), id="no rows"),
    ],
)


@pytest.mark.parametrize("name", [GATHER, REDUCE])
@pytest.mark.parametrize("kind", ["layout", "DP metadata", "no metadata"])
@ONE_RANK_INPUTS
def test_opcheck_on_one_rank(world, name, kind, x):
    """One rank, where an operator is tempted to return its input or keep its strides."""

    def make_context(groups):
        if kind == "layout":
            return layout_context([x.shape[0]], 0)
        return context(dp_metadata([x.shape[0]]) if kind == "DP metadata" else None)

    results = world.run(make_context, lambda groups: torch.library.opcheck(getattr(torch.ops.vllm, name).default, (x,)))
    assert set(results[0].values()) == {"SUCCESS"}


@pytest.fixture(scope="module")
def real_group_of_one():
    """A gloo group of this process alone, which the native collectives accept."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield TorchGroup(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [GATHER, REDUCE])
@ONE_RANK_INPUTS
def test_opcheck_on_a_real_group_of_one_rank(world, monkeypatch, real_group_of_one, name, x):
    monkeypatch.setattr(ops, "get_ep_group", lambda: real_group_of_one)
    operator = getattr(torch.ops.vllm, name)

    def body(groups):
        result = torch.library.opcheck(operator.default, (x,))
        out = operator(x)
        assert_equal(out, x.contiguous())
        assert out.is_contiguous()
        assert x.shape[0] == 0 or out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return result

    results = world.run(lambda groups: layout_context([x.shape[0]], 0), body)
    assert set(results[0].values()) == {"SUCCESS"}


def test_opcheck_finds_an_operator_that_returns_its_input(world, monkeypatch):
    """The check above can fail: the same operator without the copy on one rank."""
    monkeypatch.setattr(ops, "padded_all_gather", lambda x, rows, group, pad_value=0: x)
    library = torch.library.Library("ascend_moe_test", "FRAGMENT")
    library.define("aliases(Tensor x) -> Tensor")
    library.impl("aliases", ops._maybe_all_gather_and_maybe_unpad_impl, "CPU")
    library._register_fake("aliases", ops._maybe_all_gather_and_maybe_unpad_fake)

    def body(groups):
        with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
            torch.library.opcheck(torch.ops.ascend_moe_test.aliases.default, (torch.rand(3, 4),))

    world.run(lambda groups: layout_context([3], 0), body)
