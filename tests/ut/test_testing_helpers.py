"""The shipped test helpers: a helper that passes wrong results would make every other test worthless.

Proves that the fake group refuses wrong calls, that the launcher reports raising, dying, leaving and hanging ranks,
that comparison never passes NaN, and that test data is a function of (seed, token) alone.
"""

import os
import subprocess
import sys
from pathlib import Path

import launch_bodies
import pytest
import torch

from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.testing import data, fake_group
from vllm_ascend_moe.testing import launch as launch_module
from vllm_ascend_moe.testing.compare import BOUNDS, assert_close, assert_equal, relative_error
from vllm_ascend_moe.testing.data import Routing
from vllm_ascend_moe.testing.fake_group import MissedMeetingError, run_ranks, run_topology
from vllm_ascend_moe.testing.launch import RankFailedError, launch

NAN, INF = float("nan"), float("inf")
HERE = Path(__file__).parent


# -- compare ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "ref"),
    [
        pytest.param([NAN, 1.0], [NAN, 1.0], id="NaN in both"),
        pytest.param([NAN, 1.0], [0.0, 1.0], id="NaN in the output"),
        pytest.param([0.0, 1.0], [NAN, 1.0], id="NaN in the reference"),
        pytest.param([INF, 1.0], [-INF, 1.0], id="infinities of two signs"),
        pytest.param([1.0, 2.0], [1.0, 2.001], id="a wrong value"),
        pytest.param([0.0, 1e-30], [0.0, 0.0], id="not exactly zero where the reference is"),
        pytest.param([1.0], [1.0, 2.0], id="a shape that would broadcast"),
        pytest.param([[1.0, 2.0]], [1.0, 2.0], id="another number of dimensions"),
    ],
)
def test_neither_comparison_passes(out, ref):
    with pytest.raises(AssertionError, match=r"relative error|shape"):
        assert_close(torch.tensor(out), torch.tensor(ref))
    with pytest.raises(AssertionError, match=r"rows differ|shape"):
        assert_equal(torch.tensor(out), torch.tensor(ref))


def test_infinity_passes_only_an_exact_comparison():
    x = torch.tensor([INF, 1.0])
    assert_equal(x, x.clone())
    with pytest.raises(AssertionError, match="relative error nan"):
        assert_close(x, x.clone())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_bounds_pass_rounding_and_find_one_dropped_or_doubled_row_of_a_hundred(dtype):
    ref = data.hidden_states(0, torch.arange(100), 32, torch.float64)
    assert_close(ref.to(dtype), ref)
    for factor in (0.0, 2.0):
        wrong = ref.clone()
        wrong[41] *= factor
        with pytest.raises(AssertionError, match=r"most: row 41"):
            assert_close(wrong.to(dtype), ref)


def test_relative_error_is_the_quotient_of_norms():
    assert relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == INF


def test_equal_needs_the_same_dtype():
    with pytest.raises(AssertionError, match="dtype"):
        assert_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert_equal(torch.zeros(0, 2), torch.zeros(0, 2))


# -- data ------------------------------------------------------------------------------------------------------


def test_a_token_has_the_same_values_in_any_batch():
    for make in (
        lambda tokens: data.hidden_states(1, tokens, 8, torch.float32),
        lambda tokens: data.topk_weights(1, tokens, 3),
        lambda tokens: data.topk_ids(1, tokens, 3, 10, invalid_share=0.4),
    ):
        every = make(torch.arange(50))
        assert_equal(make(torch.tensor([7, 49, 0])), every[[7, 49, 0]])


def test_values_depend_on_seed_token_and_column_and_look_random():
    x = data.hidden_states(1, torch.arange(500), 40, torch.float64)
    assert x.unique().numel() == x.numel()
    assert not torch.isin(data.hidden_states(2, torch.arange(500), 40, torch.float64), x).any()
    assert x.abs().max() < 1
    assert abs(x.mean()) < 0.01
    assert x.var() == pytest.approx(1 / 3, abs=0.01)
    neighbours = torch.corrcoef(torch.stack([x[:-1].flatten(), x[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.02


def test_values_are_these_on_every_machine():
    """A change of the generator changes what every test sees; it must be meant."""
    x = data.hidden_states(3, torch.tensor([0, 12345]), 2, torch.float64)
    known = torch.tensor([[-0.1390501625, 0.1200332937], [0.9863298044, 0.4210685957]])
    assert_close(x, known, bound=1e-6)


def test_topk_ids_of_each_routing():
    tokens = torch.arange(400)
    uniform = data.topk_ids(1, tokens, 3, 8)
    assert uniform.dtype == torch.int32
    assert (uniform.sort(1).values.diff(dim=1) > 0).all()  # distinct
    loads = torch.bincount(uniform.flatten(), minlength=8)
    assert loads.numel() == 8
    assert loads.min() > 100
    skewed = torch.bincount(data.topk_ids(1, tokens, 1, 8, Routing.SKEWED).flatten(), minlength=8)
    assert skewed[0] > 5 * skewed[4]
    one = data.topk_ids(1, tokens, 3, 8, Routing.ONE_EXPERT, dtype=torch.int64)
    assert one.dtype == torch.int64
    assert one.unique(dim=0).tolist() == [[7, -1, -1]]
    assert data.topk_ids(1, tokens, 3, 8, Routing.FIRST_EXPERTS).unique(dim=0).tolist() == [[0, 1, 2]]
    assert data.topk_ids(1, tokens, 3, 8, Routing.NOWHERE).unique().tolist() == [-1]


def test_invalid_ids_are_of_every_kind_and_as_many_as_asked():
    ids = data.topk_ids(1, torch.arange(500), 4, 8, invalid_share=0.5)
    invalid = ids[(ids < 0) | (ids >= 8)]
    assert invalid.unique().tolist() == [-7, -1, 8, 1008]
    assert invalid.numel() / ids.numel() == pytest.approx(0.5, abs=0.03)


def test_topk_weights_sum_to_one_and_are_positive():
    weights = data.topk_weights(1, torch.arange(100), 4)
    assert_close(weights.sum(1), torch.ones(100))
    assert weights.min() > 0


def test_tokens_are_numbered_rank_after_rank():
    layout = TokenLayout.of([2, 0, 3], 0)
    assert [data.token_ids(layout, rank).tolist() for rank in range(3)] == [[0, 1], [], [2, 3, 4]]


def test_expert_weights_depend_on_the_global_expert_alone():
    every = data.expert_weights(1, range(6), 4, 8, bias=True)
    some = data.expert_weights(1, [5, 2], 4, 8, bias=True)
    for name, tensor in vars(some).items():
        assert_equal(tensor, vars(every)[name][[5, 2]], what=name)
    assert (some.w13.shape, some.w2.shape) == ((2, 16, 4), (2, 4, 8))
    assert (some.w13_bias.shape, some.w2_bias.shape) == ((2, 16), (2, 4))
    plain = data.expert_weights(1, [], 4, 8, gated=False)
    assert (plain.w13.shape, plain.w2.shape, plain.w13_bias) == ((0, 8, 4), (0, 4, 8), None)


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize(("experts", "ranks"), [(5, 2), (7, 3), (30, 8), (3, 4)])
def test_experts_are_spread_by_at_most_one_and_maps_agree(experts, ranks, placement):
    """(E, R) of VA #16384 and V #21497: every expert lives on exactly one rank."""
    shares = [data.local_experts(experts, rank, ranks, placement) for rank in range(ranks)]
    assert sorted(expert for share in shares for expert in share) == list(range(experts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for share in shares:
        slots = data.expert_map(experts, share)
        assert slots.dtype == torch.int32
        assert [expert for slot in range(len(share)) for expert in (slots == slot).nonzero().flatten()] == share
        assert (slots == -1).sum() == experts - len(share)


def test_placements_are_vllms():
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for placement in ("linear", "round_robin"):
        for rank in range(3):
            count, theirs, _ = determine_expert_map(3, rank, 7, expert_placement_strategy=placement)
            local = data.local_experts(7, rank, 3, placement)
            assert len(local) == count
            assert data.expert_map(7, local).tolist() == theirs.tolist()


def test_an_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="linear or round_robin"):
        data.local_experts(4, 0, 2, "random")


# -- fake group ------------------------------------------------------------------------------------------------


def test_collectives_of_the_fake_group():
    def body(rank, group):
        gathered = group.all_gather(torch.tensor([rank, 10 * rank]), 0)
        reduced = group.reduce_scatter(torch.arange(6) * (rank + 1), 0)
        return gathered.tolist(), reduced.tolist(), [call.op for call in group.calls]

    for rank, (gathered, reduced, calls) in enumerate(run_ranks(3, body)):
        assert gathered == [0, 0, 1, 10, 2, 20]
        assert reduced == [6 * (2 * rank), 6 * (2 * rank + 1)]
        assert calls == ["all_gather", "reduce_scatter"]


def test_one_rank_gets_its_input_back_as_from_vllms_group():
    def body(rank, group):
        x = torch.ones(2)
        return group.all_gather(x, 0) is x, group.reduce_scatter(x, 0) is x

    assert run_ranks(1, body) == [(True, True)]


def test_a_rank_may_overwrite_its_input_after_the_collective():
    def body(rank, group):
        for _ in range(50):
            x = torch.full((64,), rank)
            out = group.all_gather(x, 0)
            x.fill_(99)
            assert out.tolist() == [0] * 64 + [1] * 64 + [2] * 64

    run_ranks(3, body)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda g: g.all_gather(torch.ones(2, 4)[:, ::2], 0), "not contiguous", id="strided gather"),
        pytest.param(lambda g: g.reduce_scatter(torch.ones(4, 4).t()[:2], 0), "not contiguous", id="strided reduce"),
        pytest.param(lambda g: g.all_gather(torch.ones(2, 2), 1), "dim 0", id="another dimension"),
        pytest.param(lambda g: g.reduce_scatter(torch.ones(3), 0), "do not divide", id="rows that do not divide"),
        pytest.param(
            lambda g: g.all_gather(torch.ones(g.rank_in_group), 0), "different collectives", id="uneven gather"
        ),
        pytest.param(
            lambda g: g.all_gather(torch.ones(2, dtype=(torch.int32, torch.int64)[g.rank_in_group]), 0),
            "different collectives",
            id="two dtypes",
        ),
        pytest.param(
            lambda g: (g.all_gather, g.reduce_scatter)[g.rank_in_group](torch.ones(2), 0),
            "different collectives",
            id="two operations",
        ),
    ],
)
def test_the_fake_group_refuses(call, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, lambda rank, group: call(group))


@pytest.mark.timeout(60)
def test_a_rank_that_skips_a_collective_is_found_at_once(monkeypatch):
    """V #43547: an idle rank left the busy one waiting for an hour."""
    monkeypatch.setattr(fake_group, "_MEETING_TIMEOUT_S", 600)

    def body(rank, group):
        if rank == 0:
            group.all_gather(torch.ones(1), 0)

    with pytest.raises(MissedMeetingError, match=r"rank 0 waits .* ranks \[1\] do not enter"):
        run_ranks(2, body)


def test_the_error_of_a_rank_is_raised_and_not_its_echo():
    def body(rank, group):
        if rank == 2:
            raise KeyError("the fault")
        group.all_gather(torch.ones(1), 0)

    with pytest.raises(KeyError, match="the fault"):
        run_ranks(3, body)


def test_topology_ranks_are_dp_then_pcp_then_tp():
    """As vLLM's initialize_model_parallel makes its groups: all_ranks = arange(...).reshape(DP, PCP, TP)."""

    def body(groups):
        mine = torch.tensor([groups.ep.rank_in_group])
        return [group.all_gather(mine, 0).tolist() for group in (groups.ep, groups.dp, groups.pcp, groups.tp)]

    ranks = torch.arange(12).view(2, 3, 2)
    for rank, (ep, dp, pcp, tp) in enumerate(run_topology(body, dp_size=2, pcp_size=3, tp_size=2)):
        d, p, t = (int(i) for i in (ranks == rank).nonzero()[0])
        assert ep == list(range(12))
        assert dp == ranks[:, p, t].tolist()
        assert pcp == ranks[d, :, t].tolist()
        assert tp == ranks[d, p, :].tolist()


# -- launcher --------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_launch_returns_results_by_rank_and_prefixes_every_line():
    """In a process of its own, since the ranks write to the real standard output."""
    code = (
        "import launch_bodies\n"
        "from vllm_ascend_moe.testing.launch import launch\n"
        "if __name__ == '__main__':\n"
        "    print(launch(2, launch_bodies.sum_of_ranks, 10))\n"
    )
    # Unbuffered, as in containers: every write reaches the pipe that the ranks share at once.
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE, env=environment
    )
    *lines, last = sorted(done.stdout.splitlines(), key=lambda line: line.startswith("[("))
    assert last == str([(rank, 2, 21, 1) for rank in range(2)])
    expected = ("first line of {0}", "second line of {0}", "begun")
    assert sorted(lines) == sorted(f"[rank {rank}] {line.format(rank)}" for rank in range(2) for line in expected)
    for rank in range(2):
        assert f"[rank {rank}] fault line of {rank}" in done.stderr.splitlines()


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(UnsupportedError, match="needs a CUDA GPU"):
        launch(2, test_nccl_without_a_gpu_is_refused, backend="nccl")


def test_a_raising_rank_is_reported_with_its_traceback_long_before_the_timeout():
    with pytest.raises(RankFailedError, match="rank 1: KeyError") as caught:
        launch(2, launch_bodies.one_raises_others_hang, timeout_s=1000)
    assert "the token of rank 1" in str(caught.value)
    assert "in one_raises_others_hang" in str(caught.value)
    assert caught.value.kinds[1] == "KeyError"


@pytest.mark.multiprocess
def test_faults_of_several_ranks_are_all_reported():
    with pytest.raises(RankFailedError) as caught:
        launch(2, launch_bodies.all_raise)
    assert caught.value.kinds == {0: "ValueError", 1: "ValueError"}
    assert "fault of rank 0" in str(caught.value)
    assert "fault of rank 1" in str(caught.value)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("body", "code"),
    [(launch_bodies.one_dies_others_wait, -9), (launch_bodies.one_leaves_early, 0)],
    ids=["killed", "exits with 0 and no result"],
)
def test_a_rank_that_ends_without_a_result_is_noticed(body, code):
    with pytest.raises(RankFailedError, match=f"exit code {code}") as caught:
        launch(2, body, timeout_s=1000)
    assert caught.value.kinds[0] == "ProcessDied"


@pytest.mark.multiprocess
def test_a_hanging_run_ends_at_its_timeout_and_names_the_ranks():
    with pytest.raises(RankFailedError, match=r"ranks \[0\]: no result.*longer than 4 s") as caught:
        launch(1, launch_bodies.never_ends, timeout_s=2)
    assert caught.value.kinds == {0: "Timeout"}


@pytest.mark.multiprocess
def test_results_larger_than_a_pipe_arrive_also_after_their_process_ended(monkeypatch):
    """Tensors in a queue are shared memory of the sender, which is gone when the sender is."""
    collect = launch_module._collect

    def late(world_size, results, processes, timeout_s):
        assert results._reader.poll(60)  # it has begun to send
        processes[0].join(3)  # cannot end before its result is read, unless the result needs the process
        return collect(world_size, results, processes, timeout_s)

    monkeypatch.setattr(launch_module, "_collect", late)
    assert_equal(launch(1, launch_bodies.large_results)[0], torch.full((1_000_000,), 0.0))


@pytest.mark.multiprocess
def test_a_result_that_cannot_be_sent_is_a_fault_of_its_rank():
    with pytest.raises(RankFailedError, match=r"rank 0: .*\n(.*\n)*.*pickle"):
        launch(1, launch_bodies.unpicklable)
