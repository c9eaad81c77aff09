"""Which strategy a forward gets, why, and that every rank gets the same one. No communication takes place.

Also proves the arithmetic of the cost model: chances by drawing, bytes by counting, time by hand.
"""

from __future__ import annotations

import doctest
import logging
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_moe.comm import cost_model
from vllm_ascend_moe.comm.base import ActivationFormat
from vllm_ascend_moe.comm.batched_sizes import BatchedSizes
from vllm_ascend_moe.comm.cost_model import STRATEGIES, MoEShape, cost_of, rank_share
from vllm_ascend_moe.comm.links import LINKS, Link
from vllm_ascend_moe.comm.select import MARGIN, Decision, DecisionLog, Situation, price, select
from vllm_ascend_moe.errors import CapacityError, ConfigError, InvalidValueError, UnsupportedError
from vllm_ascend_moe.layout import TokenLayout

SHAPE = MoEShape(hidden_size=7168, num_experts=256, top_k=8)
ONE_NODE = Link(name="one node", collective_us=10, sync_us=30, gb_per_s=100)
BATCHED, ROWS = ActivationFormat.BATCHED, ActivationFormat.ROWS

shapes = st.builds(
    lambda hidden, experts, top_k, payload, splits: MoEShape(
        hidden_size=hidden, num_experts=experts, top_k=min(top_k, experts), payload=payload, splits=splits
    ),
    st.integers(1, 8192),
    st.integers(1, 300),
    st.integers(1, 10),
    st.sampled_from(["none", "int8", "fp8"]),
    st.integers(1, 4),
)
situations = st.builds(
    lambda shape, link, capacity, fixed, formats: Situation(
        shape=shape, link=LINKS[link], capacity=capacity, fixed_shapes=fixed, formats=formats
    ),
    shapes,
    st.sampled_from(sorted(LINKS)),
    st.none() | st.integers(1, 600),
    st.booleans(),
    st.sampled_from([(ROWS,), (ROWS, BATCHED)]),
)
sizes = st.lists(st.integers(0, 600), min_size=1, max_size=16).map(tuple)


def outcome(local_sizes, situation):
    try:
        return select(local_sizes, situation)
    except (ConfigError, UnsupportedError) as error:
        return str(error)


# -- the same on every rank ------------------------------------------------------------------------------------


@given(sizes=sizes, situation=situations)
def test_every_rank_decides_alike(sizes, situation):
    """Each rank builds its own layout and asks for itself, with nothing cached from the others."""
    found = []
    for rank in range(len(sizes)):
        select.cache_clear()
        cost_of.cache_clear()
        found.append(outcome(TokenLayout.of(sizes, rank).local_sizes, situation))
    assert found == found[:1] * len(sizes)


@given(sizes=sizes, situation=situations, seed=st.integers(0, 99))
def test_it_does_not_matter_which_rank_has_which_count(sizes, situation, seed):
    shuffled = list(sizes)
    random.Random(seed).shuffle(shuffled)
    assert outcome(tuple(shuffled), situation) == outcome(sizes, situation)


@given(sizes=sizes, situation=situations)
def test_what_is_chosen_is_possible_and_cheapest_and_the_rest_is_explained(sizes, situation):
    decision = outcome(sizes, situation)
    if isinstance(decision, str):
        assert situation.fixed_shapes
        assert len(set(sizes)) > 1
        return
    if decision.strategy == "batched_all_to_all":
        assert BATCHED in situation.formats
        assert max(sizes) <= situation.capacity
    if situation.fixed_shapes:
        assert decision.strategy == "batched_all_to_all" or (
            decision.strategy == "padded_allgather" and len(set(sizes)) == 1
        )
    assert {decision.strategy, *(name for name, _ in decision.rejected)} == set(STRATEGIES)
    costs = dict(decision.costs)
    for name, why in decision.rejected:
        if "cost model" in why and decision.kind == "cheapest":
            least = costs[decision.strategy] * (1 - MARGIN if decision.strategy == "padded_allgather" else 1)
            assert costs[name] >= least


# -- when each wins --------------------------------------------------------------------------------------------


def test_few_tokens_take_few_collectives_and_many_tokens_take_few_bytes():
    situation = Situation(shape=SHAPE, link=ONE_NODE, packed_bytes=1 << 40)
    chosen = [select((tokens,) * 16, situation).strategy for tokens in (1, 16, 64, 256, 4096)]
    assert (chosen[0], chosen[-1]) == ("padded_allgather", "all_to_all")
    assert sum(a != b for a, b in pairwise(chosen)) == 1, "there is one crossover"


def test_what_is_hardly_cheaper_than_a_padded_all_gather_is_not_worth_it():
    """Four collectives or two, of the same rows: two are 10.5 % and 9.5 % cheaper."""
    sent = 10 * (SHAPE.dispatch_bytes + SHAPE.return_bytes)

    def chosen(bytes_us: float) -> Decision:
        link = Link(name="x", collective_us=1, sync_us=0, gb_per_s=sent / bytes_us / 1e3)
        return select((10, 10), Situation(shape=SHAPE, link=link, capacity=10, packed_bytes=0))

    assert chosen(2 / 0.105 - 4).strategy == "batched_all_to_all"
    close = chosen(2 / 0.095 - 4)
    assert close.strategy == "padded_allgather"
    assert dict(close.rejected)["batched_all_to_all"].endswith("by the cost model, not 10% less")


def test_captured_uneven_forwards_need_a_capacity():
    sizes = (3, 1, 0, 4)
    situation = Situation(shape=SHAPE, link=ONE_NODE, fixed_shapes=True, capacity=4)
    decision = select(sizes, situation)
    assert (decision.strategy, decision.kind) == ("batched_all_to_all", "only choice")
    assert "shapes must be fixed" in dict(decision.rejected)["all_to_all"]
    with pytest.raises(ConfigError, match=r"capacity = None.*at least the 4 tokens.*without capture"):
        select(sizes, Situation(shape=SHAPE, link=ONE_NODE, fixed_shapes=True))
    assert select((4, 4, 4), Situation(shape=SHAPE, link=ONE_NODE, fixed_shapes=True)).strategy == "padded_allgather", (
        "even counts, as engines pad them for capture, have the same shapes on every rank"
    )


@pytest.mark.parametrize(("ranks", "chosen"), [(16, "padded_allgather"), (32, "padded_allgather"), (128, "all_to_all")])
def test_between_nodes_an_all_gather_sends_a_row_to_each_node_once(ranks, chosen):
    """Eight ranks of a node share it; all_to_all sends one to each rank with an expert: less from 64 ranks on."""
    sizes = (4096,) * ranks
    costs = price(sizes, Situation(shape=SHAPE, link=LINKS["atlas-a2"]))
    assert min(("padded_allgather", "all_to_all"), key=lambda name: costs[name].node_bytes) == chosen
    assert select(sizes, Situation(shape=SHAPE, link=LINKS["atlas-a2"])).strategy == chosen
    one_node = select(sizes, Situation(shape=SHAPE, link=LINKS["atlas-a3"]))
    assert one_node.strategy == "all_to_all"


@pytest.mark.parametrize("sizes", [(0,), (7,), (0, 0, 0)], ids=str)
def test_one_rank_or_no_tokens(sizes):
    decision = select(sizes, Situation(shape=SHAPE, link=ONE_NODE))
    assert decision.strategy == "padded_allgather"
    assert dict(decision.costs)["padded_allgather"] == 20


# -- configured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comm", [name for name in STRATEGIES if name != "mc2"])
def test_a_configured_strategy_is_used_though_it_is_dearer(comm):
    decision = select((3, 1), Situation(shape=SHAPE, link=ONE_NODE, comm=comm, capacity=3))
    assert (decision.strategy, decision.kind, decision.reason) == (comm, "configured", f"comm = {comm!r}")
    assert all(why == f"{comm} is configured" for name, why in decision.rejected if name != "mc2")


def test_exactly_at_capacity_passes_and_one_above_is_an_error_or_rows():
    def at(most, over):
        return select((most, 0), Situation(shape=SHAPE, comm="batched_all_to_all", capacity=8, over_capacity=over))

    assert at(8, "error").strategy == "batched_all_to_all"
    with pytest.raises(CapacityError, match=r"max\(local_sizes\) = 9.*at most capacity = 8.*over_capacity"):
        at(9, "error")
    fallen_back = at(9, "rows")
    assert (fallen_back.strategy, fallen_back.kind) == ("all_to_all", "over capacity")
    assert "9 tokens on a rank, capacity 8" in str(fallen_back)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"comm": "batched_all_to_all"}, ConfigError, "capacity = None"),
        ({"comm": "batched_all_to_all", "capacity": 9, "formats": (ROWS,)}, UnsupportedError, "batched format"),
        ({"comm": "all_to_all", "formats": (BATCHED,)}, UnsupportedError, "rows format"),
        ({"comm": "all_to_all", "fixed_shapes": True}, UnsupportedError, "follow the routing"),
        ({"comm": "padded_allgather", "fixed_shapes": True}, UnsupportedError, "uneven token counts"),
        (
            {"comm": "batched_all_to_all", "capacity": 1, "over_capacity": "rows", "fixed_shapes": True},
            CapacityError,
            "capacity = 1",
        ),
        ({"comm": "fastest"}, ConfigError, "comm = 'fastest'"),
        ({"capacity": 0}, InvalidValueError, "capacity = 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        select((3, 1), Situation(shape=SHAPE, link=ONE_NODE, **changes))


def test_no_ranks_are_refused():
    with pytest.raises(InvalidValueError, match="one count a rank"):
        select((), Situation(shape=SHAPE))


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", 0), ("num_experts", 0), ("top_k", 0), ("top_k", 257), ("element_bytes", 0)]
)
def test_sizes_of_no_model_are_refused(field, value):
    with pytest.raises(InvalidValueError, match=f"{field} = {value}"):
        MoEShape(**{"hidden_size": 4, "num_experts": 256, "top_k": 2, field: value})


@pytest.mark.parametrize("field", ["gb_per_s", "node_gb_per_s", "ranks_per_node"])
def test_links_without_bandwidth_are_refused(field):
    with pytest.raises(InvalidValueError, match=rf"link\.{field} = 0"):
        Link(**{"name": "x", "collective_us": 1, "sync_us": 1, "gb_per_s": 1, field: 0})


# -- the cost model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(2, 8, 2), (8, 64, 6), (4, 6, 3), (32, 256, 8), (4, 4, 4)])
def test_the_chance_of_an_expert_on_a_rank_is_what_drawing_finds(ranks, experts, top_k):
    generator, draws = random.Random(0), 4000
    found = sum(
        len({expert * ranks // experts for expert in generator.sample(range(experts), top_k)}) for _ in range(draws)
    ) / (draws * ranks)
    # E not divisible by R: the formula spreads experts evenly, where some ranks have one more.
    assert rank_share(experts / ranks, experts, top_k) == pytest.approx(
        found, abs=0.02 + (0.02 if experts % ranks else 0)
    )


def test_bytes_and_time_by_hand():
    """4 ranks, 10 tokens on the fullest, hidden 100 in bf16, top-2 of 4: p = 1 - 3/4 * 2/3 = 1/2."""
    shape = MoEShape(hidden_size=100, num_experts=4, top_k=2)
    sizes, d, o = (10, 0, 1, 4), 200 + 16, 200
    link = Link(name="x", collective_us=7, sync_us=5, gb_per_s=0.001, ranks_per_node=2, node_gb_per_s=0.0005)
    padded = cost_of("padded_allgather", sizes, shape, link, None, True)
    assert (padded.dispatch_bytes, padded.combine_bytes) == (30 * d, 30 * o)
    assert padded.node_bytes == 10 * (d + o)  # 2 foreign ranks, 10 rows each, shared by 2 adapters
    assert padded.us == pytest.approx(2 * 7 + 30 * (d + o))  # 1 byte a us; half of that between nodes: 20 * (d + o)
    assert cost_of("padded_allgather", sizes, shape, link, None, False).collectives == 4
    rows = cost_of("all_to_all", sizes, shape, link, None, True)
    assert (rows.dispatch_bytes, rows.combine_bytes, rows.collectives, rows.syncs) == (15 * d, 15 * o, 3, 1)
    assert rows.us == pytest.approx(3 * 7 + 5 + 10 * (d + o) / 0.5)
    batched = cost_of("batched_all_to_all", sizes, shape, link, 12, True)
    assert (batched.dispatch_bytes, batched.combine_bytes, batched.syncs) == (36 * d, 36 * o, 0)
    assert batched.node_bytes == 12 * d + 24 * o  # an all-gather out, an all-to-all back
    assert batched.us == pytest.approx(2 * 7 + 36 * d + 24 * o / 0.5)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("ranks", "experts", "capacity"), [(2, 8, 3), (16, 256, 128), (8, 60, 1)])
def test_the_batched_strategy_and_the_planner_have_the_same_sizes(ranks, experts, capacity, quantized):
    """Up to one row more a buffer, and the alignment of rows to 16 bytes."""
    shape = MoEShape(hidden_size=4096, num_experts=experts, top_k=4, payload="int8" if quantized else "none")
    cost = cost_of("batched_all_to_all", (capacity,) * ranks, shape, ONE_NODE, capacity, True)
    sizes = BatchedSizes(
        ranks=ranks,
        capacity=capacity,
        num_local=-(-experts // ranks),
        hidden_size=4096,
        top_k=4,
        token_bytes=1 if quantized else 2,
        scale_bytes=4 if quantized else 0,
    )
    assert cost.dispatch_bytes == pytest.approx(sizes.sent_out, rel=0.01)
    assert cost.combine_bytes == sizes.sent_back
    own = cost.memory_bytes - capacity * shape.return_bytes
    assert own == pytest.approx(sizes.most_at_once, abs=16 * ranks * capacity + 2 * shape.return_bytes)


def test_examples_in_the_docstrings():
    result = doctest.testmod(cost_model)
    assert result.attempted
    assert result.failed == 0


def test_a_quantised_payload_halves_what_goes_out_and_nothing_else():
    wide, narrow = (MoEShape(hidden_size=7168, num_experts=256, top_k=8, payload=p) for p in ("none", "int8"))
    assert narrow.dispatch_bytes == 7168 + 4 + 64
    assert 0.5 < narrow.dispatch_bytes / wide.dispatch_bytes < 0.51
    assert narrow.return_bytes == wide.return_bytes


@given(sizes=sizes, shape=shapes, link=st.sampled_from(sorted(LINKS)), capacity=st.integers(1, 600))
def test_more_tokens_never_cost_less(sizes, shape, link, capacity):
    more = tuple(size + 1 for size in sizes)
    for name in STRATEGIES:
        less, dearer = (cost_of(name, s, shape, LINKS[link], capacity, True) for s in (sizes, more))
        assert dearer.us >= less.us
        assert dearer.memory_bytes >= less.memory_bytes


def test_every_preset_says_where_its_figures_come_from():
    for name, link in LINKS.items():
        assert link.name == name
        assert any(word in link.source for word in ("measured", "published", "assumed"))


# -- log -------------------------------------------------------------------------------------------------------


def test_each_kind_of_decision_is_logged_once(caplog: pytest.LogCaptureFixture):
    log = DecisionLog()
    situation = Situation(shape=SHAPE, comm="batched_all_to_all", capacity=4, over_capacity="rows")
    with caplog.at_level(logging.INFO):
        for most in (1, 2, 5, 3, 9):
            log(select((most, 0), situation))
    assert len(caplog.messages) == 2
    assert "batched_all_to_all, configured" in caplog.messages[0]
    assert "all_to_all, over capacity: 5 tokens on a rank, capacity 4 (not padded_allgather" in caplog.messages[1]


def test_a_decision_is_a_value():
    assert isinstance(hash(select((1, 2), Situation(shape=SHAPE))), int)
    assert isinstance(select((1, 2), Situation(shape=SHAPE)), Decision)
