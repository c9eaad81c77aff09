"""The choice where the backend has uneven collectives, and between NPUs: mc2, its limits, and what both cost.

No communication takes place, and nothing here proves HCCL; see tests/e2e/npu.
"""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.comm import links, mc2_limits
from vllm_ascend_moe.comm.cost_model import MoEShape, cost_of
from vllm_ascend_moe.comm.links import LINKS, Link, link_of
from vllm_ascend_moe.comm.mc2 import _all_different
from vllm_ascend_moe.comm.mc2_limits import PRODUCTS, Sizes, fault_of, most_tokens
from vllm_ascend_moe.comm.select import Situation, price, select
from vllm_ascend_moe.errors import (
    CapacityError,
    ConfigError,
    DtypeError,
    InvalidValueError,
    PlacementError,
    ShapeError,
    UnsupportedError,
)

SHAPE = {"hidden_size": 7168, "num_experts": 256, "top_k": 8}
BUFFER = 4000


def situation(link: str = "atlas-a3", **changes: object) -> Situation:
    shape = MoEShape(**(SHAPE | {key: changes.pop(key) for key in list(changes) if key in MoEShape.__annotations__}))
    return Situation(**({"shape": shape, "link": LINKS[link], "hccl_buffer_mib": BUFFER} | changes))


# -- mc2 -------------------------------------------------------------------------------------------------------


def test_decoding_on_many_npus_goes_by_mc2_and_says_so():
    decision = select((64,) * 32, situation())
    assert (decision.strategy, decision.kind) == ("mc2", "cheapest")
    assert "us by the cost model on atlas-a3" in decision.reason


def test_above_its_tokens_auto_takes_another_and_gives_the_numbers():
    decision = select((513, *[64] * 31), situation(hccl_buffer_mib=1 << 20))
    assert decision.strategy == "all_to_all"
    assert dict(decision.rejected)["mc2"] == "tokens of a rank = 513, but it must be 1 to 512 on Atlas A3"


@pytest.mark.parametrize("link", ["gloo", "nvlink"])
def test_without_npus_it_is_no_choice_and_no_configuration(link):
    why = dict(select((4, 2), situation(link)).rejected)["mc2"]
    assert "npu" in why or "torch_npu" in why
    assert f"devices of type {LINKS[link].device}" in why
    assert "mc2" not in price((4, 2), situation(link))
    with pytest.raises(ConfigError, match=f"comm = 'mc2'.*devices of type {LINKS[link].device}.*over HCCL.*Choose"):
        select((4, 2), situation(link, comm="mc2"))


REFUSED = {
    "ranks": ({}, 9, 4, InvalidValueError, "ranks = 9, but it must be one of 2, 3, 4, 5, 6, 7, 8, 16, 32"),
    "one rank": ({}, 1, 4, InvalidValueError, "ranks = 1"),
    "experts": ({"num_experts": 255}, 8, 4, PlacementError, "num_experts = 255, but it must be as many on each of 8"),
    "experts of TP": ({"num_experts": 8, "splits": 2}, 8, 4, PlacementError, "as many on each of 16 ranks"),
    "too many experts": ({"num_experts": 2048}, 8, 4, PlacementError, "1024 in a group"),
    "top-k": ({"top_k": 17}, 8, 4, ShapeError, "top_k = 17, but it must be 1 to 16"),
    "top-k of TP": ({"num_experts": 16, "splits": 4, "top_k": 5}, 4, 4, ShapeError, "top_k = 5, but it must be 1 to 4"),
    "hidden": (
        {"hidden_size": 7000},
        8,
        4,
        ShapeError,
        "hidden_size = 7000, but it must be a multiple of 32 from 32 to",
    ),
    "wide": ({"hidden_size": 8192}, 8, 4, ShapeError, "to 7168 on Atlas A2"),
    "tokens": ({}, 8, 257, CapacityError, "tokens of a rank = 257, but it must be 1 to 256 on Atlas A2"),
    "buffer": ({"hccl_buffer_mib": 200}, 16, 128, ConfigError, "HCCL_BUFFSIZE = 200, but it must be at least 452"),
    "fp32": ({"element_bytes": 4}, 8, 4, DtypeError, "bytes of an element = 4, but it must be 2"),
    "fp8": ({"payload": "fp8"}, 8, 4, ConfigError, "quantize_dispatch = 'fp8'"),
    "exact": ({"exact": True}, 8, 4, ConfigError, "exact = True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_limit_is_an_obstacle_and_configured_an_error_with_numbers(name):
    changes, ranks, tokens, error, text = REFUSED[name]
    sizes = (tokens, *[0] * (ranks - 1))
    assert text in dict(select(sizes, situation("atlas-a2", **changes)).rejected)["mc2"]
    with pytest.raises(error) as raised:
        select(sizes, situation("atlas-a2", comm="mc2", **changes))
    assert text in str(raised.value)


def test_configured_it_takes_rows_above_its_tokens_where_the_user_says_so():
    rows = situation("atlas-a2", comm="mc2", over_capacity="rows")
    assert [select((tokens, 0), rows).strategy for tokens in (0, 256, 257)] == ["mc2", "mc2", "all_to_all"]
    assert select((257, 0), rows).kind == "over capacity"
    with pytest.raises(ShapeError):  # no matter of tokens
        select((1, 0), situation("atlas-a2", comm="mc2", over_capacity="rows", hidden_size=100))


def test_captured_with_uneven_counts_it_is_refused_and_with_even_ones_not():
    fixed = situation("atlas-a2", comm="mc2", fixed_shapes=True)
    assert select((3, 3), fixed).strategy == "mc2"
    with pytest.raises(UnsupportedError, match="uneven token counts"):
        select((3, 2), fixed)


@pytest.mark.parametrize("link", ["atlas-a2", "atlas-a3"])
@given(
    ranks=st.sampled_from([2, 8, 16]), experts=st.integers(1, 16), top_k=st.integers(1, 16), buffer=st.integers(1, 999)
)
def test_the_most_tokens_fit_and_one_more_does_not(link, ranks, experts, top_k, buffer):
    product = PRODUCTS[link]

    def sizes(tokens: int) -> Sizes:
        return Sizes(ranks=ranks, num_experts=ranks * experts, max_tokens=tokens, hidden_size=4096, top_k=top_k)

    most = most_tokens(sizes(1), product, buffer)
    assert most == 1 or sizes(most).buffer_mib(product) <= buffer
    assert most == product.max_tokens or sizes(most + 1).buffer_mib(product) > buffer
    if top_k <= ranks * experts and sizes(1).buffer_mib(product) <= buffer:
        assert fault_of(sizes(most), product, buffer) is None


def test_the_buffer_on_atlas_a3_by_hand():
    """2 ranks of 2 experts, 3 tokens, top-2, H = 1024: a row is 2048 bytes, with 64 more in units of 512."""
    sizes = Sizes(ranks=2, num_experts=4, max_tokens=3, hidden_size=1024, top_k=2)
    assert PRODUCTS["atlas-a3"].buffer_bytes(3, 2, 2, 2, 1024) == 2 * 3 * (2 * 2 * 2560 + 2 * 2048)
    assert sizes.buffer_mib(PRODUCTS["atlas-a3"]) == 1


# -- ids that are all different ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 16), top_k=st.integers(1, 8), more=st.integers(0, 8))
def test_unrouted_choices_go_where_the_token_does_not_go_yet(seed, top_k, more):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(top_k + more, generator=generator)[:top_k] for _ in range(9)]).int()
    nowhere = torch.rand(9, top_k, generator=generator) < 0.5
    out = _all_different(positions.masked_fill(nowhere, -1), nowhere)
    assert out.dtype == torch.int32
    assert torch.equal(out[~nowhere], positions[~nowhere])
    for row in out.tolist():
        assert len(set(row)) == top_k
        assert set(row) <= set(range(top_k + more))


# -- uneven collectives ------------------------------------------------------------------------------------------


LONG = (4096, 0, 0, 0, 0, 0, 0, 0)


def test_forwarded_rows_make_very_uneven_counts_cheap():
    decision = select(LONG, situation("nvlink", num_experts=64))
    assert (decision.strategy, decision.kind) == ("uneven_allgather", "cheapest")
    assert select((512,) * 8, situation("nvlink", num_experts=64)).strategy != "uneven_allgather"


def test_where_copies_travel_it_is_for_the_buffers():
    """With as many choices as experts nothing is faster than the padded all-gather."""
    whole = situation("atlas-a2", num_experts=8)
    decision = select(LONG, whole)
    assert (decision.strategy, decision.kind) == ("uneven_allgather", "smallest")
    assert decision.reason == "as fast as padded_allgather, with 168 MiB of buffers instead of 954"
    assert select((40, *[0] * 7), whole).strategy == "padded_allgather", "a few MiB are not worth it"
    assert select((4096,) * 8, whole).strategy == "padded_allgather"


def test_gloo_has_none_and_takes_copies_where_it_is_told_to():
    assert (
        "gloo has no collectives of uneven sizes" in dict(select(LONG, situation("gloo")).rejected)["uneven_allgather"]
    )
    assert select(LONG, situation("gloo", comm="uneven_allgather")).kind == "configured"


def test_hccl_has_them_within_one_host():
    why = dict(select((1,) * 16, situation("atlas-a2")).rejected)["uneven_allgather"]
    assert why == "collectives of uneven sizes take at most 8 ranks on atlas-a2, not 16"
    with pytest.raises(UnsupportedError, match=r"collectives of uneven sizes take at most 8.*Choose"):
        select((1,) * 16, situation("atlas-a2", comm="uneven_allgather"))


def test_captured_it_needs_even_counts():
    with pytest.raises(UnsupportedError, match="uneven token counts"):
        select((3, 2), situation("nvlink", comm="uneven_allgather", fixed_shapes=True))
    assert select((3, 3), situation("nvlink", comm="uneven_allgather", fixed_shapes=True)).kind == "configured"


# -- the cost model ------------------------------------------------------------------------------------------------


def test_bytes_and_time_by_hand():
    """4 ranks, 10 tokens on the fullest and 15 in all, hidden 100 in bf16, top-2 of 4; nodes of two."""
    shape = MoEShape(hidden_size=100, num_experts=4, top_k=2)
    sizes, d, o = (10, 0, 1, 4), 200 + 16, 200
    figures = {"collective_us": 7, "sync_us": 5, "gb_per_s": 0.001, "ranks_per_node": 2, "node_gb_per_s": 0.0005}
    forwarded, copies = (Link(name="x", uneven=uneven, **figures) for uneven in ("forwarded", "copies"))
    uneven = cost_of("uneven_allgather", sizes, shape, forwarded, None, True)
    assert (uneven.dispatch_bytes, uneven.combine_bytes, uneven.collectives) == (15 * d, 15 * o, 2)
    assert uneven.memory_bytes == 15 * (d + o) + 10 * o
    padded = cost_of("padded_allgather", sizes, shape, copies, None, True)
    copied = cost_of("uneven_allgather", sizes, shape, copies, None, True)
    assert (copied.us, copied.node_bytes, copied.memory_bytes) == (padded.us, padded.node_bytes, uneven.memory_bytes)
    assert cost_of("uneven_allgather", sizes, shape, copies, None, False).collectives == 4
    fused = cost_of("mc2", sizes, shape, copies, None, True)
    # 20 choices, 15 of them on other ranks and 10 on the other node; rows carry neither ids nor weights.
    assert (fused.dispatch_bytes, fused.combine_bytes) == (15 * 200, 15 * 200)
    assert (fused.node_bytes, fused.collectives, fused.syncs) == (10 * 400, 2, 0)
    assert fused.us == pytest.approx(2 * 7 + 10 * 400 / 0.5)
    assert fused.memory_bytes == 10 * 4 * 1 * 400 + 10 * o
    network = Link(name="x", mc2_by_network=True, **figures)
    assert cost_of("mc2", sizes, shape, network, None, True).node_bytes == 15 * 400


def test_a_group_with_a_part_of_the_experts_gets_fewer_rows_and_smaller_buffers():
    """Two groups of 4 ranks share 16 experts as one group of 8 would: the same chance of an expert on a rank."""
    halves, whole = (MoEShape(hidden_size=64, num_experts=16, top_k=2, splits=splits) for splits in (2, 1))
    part = cost_of("all_to_all", (9,) * 4, halves, LINKS["gloo"], None, True)
    eight = cost_of("all_to_all", (9,) * 8, whole, LINKS["gloo"], None, True)
    assert part.dispatch_bytes / 3 == pytest.approx(eight.dispatch_bytes / 7, abs=1)
    batched = [cost_of("batched_all_to_all", (9,) * 4, shape, LINKS["gloo"], 9, True) for shape in (halves, whole)]
    row = halves.row_bytes + halves.return_bytes
    assert batched[1].memory_bytes - batched[0].memory_bytes == 4 * 9 * (16 // 4 - 16 // 8) * row


def test_the_link_of_a_device():
    assert [link_of(kind).name for kind in ("cpu", "cuda", "npu")] == ["gloo", "nvlink", "atlas-a2"]
    with pytest.raises(InvalidValueError, match="device_type = 'xpu'"):
        link_of("xpu")


@pytest.mark.parametrize("module", [links, mc2_limits])
def test_examples_in_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0
