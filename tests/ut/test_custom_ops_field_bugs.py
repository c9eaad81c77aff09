"""Faults reported in public for such operators, each as its small input. The name says where it was reported:
va vllm-ascend, v vllm.

Proves the real operators and their fakes on hand-written groups; a fault of a real backend or of torch.compile would
not show here.
"""

import pytest
import torch
from marked_rows import padded, rows
from ops_world import (
    GATHER_FAKE,
    REDUCE_FAKE,
    context,
    dp_metadata,
    gather,
    layout_context,
    ops,
    reduce,
)

from vllm_ascend_moe.experts.reference import local_slots
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY, ForwardLayouts
from vllm_ascend_moe.testing.compare import assert_equal


def assert_fakes_match(x, out, back):
    """The fakes, called as they are, give what the real operators gave."""
    for real, fake in ((out, GATHER_FAKE(x)), (back, REDUCE_FAKE(out))):
        assert (real.shape, real.dtype, real.device) == (fake.shape, fake.dtype, fake.device)
        assert real.stride() == fake.stride()


def test_va_16477_dp_pcp_tp_share_one_mapping(world):
    """DP=2 PCP=2 TP=2, DP tokens 5 and 2: real gather, real reduce and both fakes follow (dp*2 + pcp)*2 + tp."""
    sizes = [3, 3, 3, 3, 1, 1, 1, 1]

    def body(groups):
        rank = groups.ep.rank_in_group
        x = rows(rank, sizes[rank], width=1)
        with ops.get_forward_context().dp_metadata.sp_local_sizes(2):
            assert ops._get_ep_local_sizes(ops.get_forward_context().dp_metadata, groups.ep) == sizes
            out = gather(x)
            back = reduce(out * (rank == 3))
            assert_fakes_match(x, out, back)
        assert_equal(out, padded(sizes, width=1))
        assert_equal(back, x)

    world.sized(dp=2, pcp=2, tp=2).run(lambda groups: context(dp_metadata([5, 2])), body)
    assert world.calls == [["all_gather", "reduce_scatter"]] * 8


@pytest.mark.parametrize("flag", ["is_draft_model", "is_vl_model", "sp_enabled", "flash_comm_v1_enabled"])
@pytest.mark.parametrize("value", [True, False])
def test_va_16081_draft_and_multimodal_flags_change_nothing(world, flag, value):
    """R=4, sizes [1, 1, 3, 3]: reduce returns (sizes[rank], H), one reduce-scatter over EP and no TP all-reduce."""
    sizes = [1, 1, 3, 3]

    def make_context(groups):
        made = context(dp_metadata([2, 6]))
        setattr(made, flag, value)
        return made

    def body(groups):
        rank = groups.ep.rank_in_group
        x = rows(rank, sizes[rank])
        with ops.get_forward_context().dp_metadata.sp_local_sizes(2):
            out = gather(x)
            back = reduce(out * (rank == 2))
            assert_fakes_match(x, out, back)
        assert_equal(back, x)

    world.sized(dp=2, tp=2).run(make_context, body)
    assert world.calls == [["all_gather", "reduce_scatter"]] * 4


@pytest.mark.parametrize("tail", [(), (2880,)], ids=["1-D", "2880 columns"])
def test_va_12748_v_41646_fakes_use_the_ep_size(world, tail):
    """R=4 as DP=2 x TP=2, sizes [2, 2, 3, 3]: the fakes have 4*3 rows (not TP*3) and the real number of columns."""
    sizes = [2, 2, 3, 3]

    def body(groups):
        rank = groups.ep.rank_in_group
        x = torch.ones(sizes[rank], *tail, dtype=torch.bfloat16)
        with ops.get_forward_context().dp_metadata.sp_local_sizes(2):
            out = gather(x)
            assert out.shape == (12, *tail)
            assert_fakes_match(x, out, reduce(out))

    world.sized(dp=2, tp=2).run(lambda groups: context(dp_metadata([4, 6])), body)


@pytest.mark.parametrize("sizes", [[3], [2, 2]], ids=["one rank", "equal sizes"])
def test_v_44130_nothing_to_pad_still_gives_a_new_tensor(world, sizes):
    """Writing to the output must not write to the input."""

    def body(groups):
        x = rows(groups.ep.rank_in_group, sizes[0])
        gather(x).add_(1)
        assert_equal(x, rows(groups.ep.rank_in_group, sizes[0]))
        whole = padded(sizes)
        reduce(whole).add_(1)
        assert_equal(whole, padded(sizes))

    world.run_layout(sizes, body)


def test_va_7297_pad_rows_choose_no_expert(world):
    """DP=2 with 1 and 64 tokens: 63 pad rows carry id -1, so expert loads are those of the 65 real tokens."""
    sizes, num_experts = [1, 64], 4

    def body(groups):
        rank = groups.ep.rank_in_group
        ids = (torch.arange(sizes[rank] * 2, dtype=torch.int32).view(-1, 2) + rank) % num_experts
        gathered = gather(ids)
        return ids, local_slots(gathered, None, num_experts)

    (ids0, slots), (ids1, _) = world.run_layout(sizes, body)
    assert (slots == -1).sum() == 2 * 63
    loads = torch.bincount(slots[slots >= 0], minlength=num_experts)
    assert loads.tolist() == torch.bincount(torch.cat([ids0, ids1]).flatten(), minlength=num_experts).tolist()


@pytest.mark.parametrize(
    ("dp", "tp", "sp"),
    [(2, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 1)],
    ids=["DP=2", "TP=2 with SP", "DP=2 TP=2 with SP", "DP=2 TP=2 without SP"],
)
def test_va_6710_9389_10557_output_is_reduced_exactly_once(world, dp, tp, sp):
    """One token per rank, one identity expert per rank of the communicating group, weights that sum to 1."""

    def body(groups):
        group = groups.ep if sp == tp else groups.dp
        x = rows(group.rank_in_group, 1)
        with ops.get_forward_context().dp_metadata.sp_local_sizes(sp):
            out = reduce(gather(x) * (1.0 / group.world_size))
        assert_equal(out, x)

    world.sized(dp=dp, tp=tp).run(lambda groups: context(dp_metadata([sp] * dp)), body)
    assert world.calls == [["all_gather", "reduce_scatter"]] * (dp * tp)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_torchtitan_3622_fewer_tokens_than_tp_and_nan_in_the_sequence_pad(world, tokens):
    """TP=4 as SP: rows past the tokens hold NaN; they come back as rows of their own and reach no token."""
    chunk = -(-tokens // 4)
    whole = torch.full((4 * chunk, 3), float("nan"))
    whole[:tokens] = rows(0, tokens)

    def body(groups):
        rank = groups.ep.rank_in_group
        with ops.get_forward_context().dp_metadata.sp_local_sizes(4):
            out = gather(whole[rank * chunk : (rank + 1) * chunk])
            return reduce(out * 0.25)

    results = world.sized(tp=4).run(lambda groups: context(dp_metadata([tokens])), body)
    assert_equal(torch.cat(results)[:tokens], whole[:tokens])


def test_v_53191_the_group_is_never_guessed_from_a_shape(world):
    """T=1, TP=2: the same (1, H) input is an SP chunk of EP or a DP rank's whole input, by the active layout alone."""

    def make_context(groups):
        layouts = {
            "ep": TokenLayout.of([1] * 4, groups.ep.rank_in_group),
            "dp": TokenLayout.of([1, 1], groups.dp.rank_in_group),
        }
        return context(**{FORWARD_LAYOUTS_KEY: ForwardLayouts(by_group=layouts)})

    def body(groups):
        x = rows(groups.ep.rank_in_group, 1)
        layouts = ops.get_forward_context().additional_kwargs[FORWARD_LAYOUTS_KEY]
        over_ep = gather(x)
        with layouts.use("dp"):
            over_dp = gather(x)
        return over_ep, over_dp

    for rank, (over_ep, over_dp) in enumerate(world.sized(dp=2, tp=2).run(make_context, body)):
        assert_equal(over_ep, torch.cat([rows(r, 1) for r in range(4)]))
        assert_equal(over_dp, torch.cat([rows(r, 1) for r in (rank % 2, 2 + rank % 2)]))


def test_v_21963_chunks_of_uneven_ranks_meet_in_every_collective(world):
    """Chunk 4, sizes [9, 3, 4]: every rank goes through all 3 chunks with one size vector each, and nobody waits."""
    sizes, chunk = [9, 3, 4], 4
    chunks = [[min(chunk, max(0, size - start)) for size in sizes] for start in range(0, max(sizes), chunk)]
    assert chunks == [[4, 3, 4], [4, 0, 0], [1, 0, 0]]

    def body(groups):
        rank, back = groups.ep.rank_in_group, []
        x = rows(rank, sizes[rank])
        for i, of_chunk in enumerate(chunks):
            layouts = ForwardLayouts(by_group={"ep": TokenLayout.of(of_chunk, rank)}, active="ep")
            ops.get_forward_context().additional_kwargs[FORWARD_LAYOUTS_KEY] = layouts
            mine = x[i * chunk :][: of_chunk[rank]]
            back.append(reduce(gather(mine) * (rank == i)))
        assert_equal(torch.cat(back), x)

    world.sized(dp=3).run(lambda groups: layout_context(sizes, groups.ep.rank_in_group), body)
    assert world.calls == [["all_gather", "reduce_scatter"] * 3] * 3


@pytest.mark.parametrize("name", ["x[:, ::2]", "buffer[:, 1]"])
def test_pytorch_128066_strided_inputs_are_made_contiguous(world, name):
    """The fake group refuses what NCCL and HCCL corrupt."""

    def strided(rank, size):
        wide = rows(rank, size, width=8)
        return wide[:, ::2] if name == "x[:, ::2]" else wide.view(size, 2, 4)[:, 1]

    def body(groups):
        x, y = strided(groups.ep.rank_in_group, 2), strided(groups.ep.rank_in_group, 4)
        assert not x.is_contiguous()
        assert not y.is_contiguous()
        return gather(x), reduce(y)

    for rank, (out, back) in enumerate(world.run_layout([2, 2], body)):
        assert_equal(out, torch.cat([strided(0, 2), strided(1, 2)]))
        assert_equal(back, (strided(0, 4) + strided(1, 4))[2 * rank :][:2])


# -- dtypes ----------------------------------------------------------------------------------------------------


def test_v_31055_32669_router_logits_keep_fp32_beside_bf16_hidden(world):
    """Logits that differ by less than a bf16 step choose the same experts after the gather as before."""
    sizes = [3, 1]

    def body(groups):
        rank = groups.ep.rank_in_group
        logits = torch.ones(sizes[rank], 4)
        logits[torch.arange(sizes[rank]), (torch.arange(sizes[rank]) + rank) % 4] += 1e-6
        hidden = torch.ones(sizes[rank], 8, dtype=torch.bfloat16)
        return gather(hidden), logits, gather(logits)

    results = world.run_layout(sizes, body)
    chosen = [logits.argmax(1).tolist() for _, logits, _ in results]
    assert chosen == [[0, 1, 2], [1]]
    for hidden, _, logits in results:
        assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
        assert logits[[0, 1, 2, 3]].argmax(1).tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize("scale_shape", [(), (1,)], ids=["scale (n,)", "scale (n, 1)"])
def test_va_3420_13414_each_scale_stays_with_its_row(world, scale_shape):
    """int8 rows with fp32 scales, sizes [1, 3]: dequantised after the gather is the gather of the dequantised."""
    sizes = [1, 3]

    def body(groups):
        rank = groups.ep.rank_in_group
        x = rows(rank, sizes[rank], width=8, dtype=torch.int8)
        scale = (rows(rank, sizes[rank], width=1) / 1024).view(-1, *scale_shape)
        out, scales = gather(x), gather(scale)
        assert scales.shape == (6, *scale_shape)
        assert_equal(out.float() * scales.view(-1, 1), gather(x.float() * scale.view(-1, 1)))

    world.run_layout(sizes, body)
