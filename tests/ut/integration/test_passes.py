"""Which passes a forward takes, and the limits and values they follow from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_ascend_moe.comm.cost_model import MoEShape
from vllm_ascend_moe.comm.links import LINKS
from vllm_ascend_moe.comm.select import Situation
from vllm_ascend_moe.config import AscendMoEConfig
from vllm_ascend_moe.errors import CapacityError, ConfigError, UnsupportedError
from vllm_ascend_moe.integration.passes import PassPlanner
from vllm_ascend_moe.integration.strategies import (
    default_capacity,
    describe,
    make_situation,
    must_agree,
    possible_strategies,
)
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.placement import ExpertPlacement

SHAPE = MoEShape(hidden_size=64, num_experts=8, top_k=2)
NPU = {"link": LINKS["atlas-a2"]}


def planner(max_tokens: int | None = None, **situation: object) -> PassPlanner:
    return PassPlanner(Situation(shape=SHAPE, **situation), max_tokens)


@pytest.mark.parametrize("sizes", [[9, 3, 4], [0, 0], [1, 8], [4, 4]], ids=str)
def test_passes_take_every_token_once_and_are_the_same_on_every_rank(sizes: list[int]) -> None:
    made = planner(4, comm="all_to_all")
    by_rank = [made.passes(TokenLayout.of(sizes, rank)) for rank in range(len(sizes))]
    assert len({tuple((each.strategy, each.layout.local_sizes) for each in passes) for passes in by_rank}) == 1
    for rank, passes in enumerate(by_rank):
        taken = [row for each in passes for row in range(sizes[rank])[each.rows]]
        assert taken == list(range(sizes[rank]))
        for each in passes:
            assert each.layout.max_local_size <= 4
            assert each.layout.local_size == each.rows.stop - each.rows.start
    assert len(by_rank[0]) == max(1, -(-max(sizes) // 4))


def test_without_a_bound_all_tokens_take_one_pass() -> None:
    layout = TokenLayout.of([9, 3], 1)
    [only] = planner(comm="padded_allgather").passes(layout)
    assert only.layout is layout
    assert only.rows == slice(0, 3)


def test_layers_of_a_forward_share_a_plan_and_the_next_forward_has_its_own() -> None:
    made = planner(comm="batched_all_to_all", capacity=8, over_capacity="rows")
    small, large = TokenLayout.of([3, 1], 0), TokenLayout.of([9, 1], 0)
    assert made.passes(small) is made.passes(small)
    assert [made.passes(layout)[0].strategy for layout in (large, small, large)] == [
        "all_to_all",
        "batched_all_to_all",
        "all_to_all",
    ]


def test_capacity_is_per_pass() -> None:
    layout = TokenLayout.of([9, 1], 1)
    with pytest.raises(CapacityError):
        planner(comm="batched_all_to_all", capacity=4).passes(layout)
    assert len(planner(4, comm="batched_all_to_all", capacity=4).passes(layout)) == 3


def limits(tp: int = 1, speculative: int | None = None) -> SimpleNamespace:
    """The fields of vLLM's configuration that the capacity follows from."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=101, max_num_seqs=16),
        speculative_config=None if speculative is None else SimpleNamespace(num_speculative_tokens=speculative),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.mark.parametrize(
    ("values", "config", "group", "expected"),
    [
        ({}, {"comm": "batched_all_to_all"}, "dp", 101),
        ({"tp": 2}, {"comm": "batched_all_to_all"}, "ep", 51),
        ({"tp": 2}, {"comm": "batched_all_to_all"}, "dp", 101),
        ({}, {"comm": "auto"}, "dp", 16),
        ({"speculative": 3}, {"comm": "auto"}, "dp", 64),
        ({"speculative": 30}, {"comm": "auto"}, "dp", 101),
        ({"tp": 4}, {"comm": "auto"}, "ep", 4),
        ({}, {"comm": "batched_all_to_all", "max_tokens_in_flight": 32}, "dp", 32),
    ],
    ids=["any-step", "sp", "tp-without-sp", "decoding", "drafts", "drafts-at-most", "decoding-sp", "bounded-passes"],
)
def test_default_capacity(values: dict[str, int], config: dict[str, object], group: str, expected: int) -> None:
    assert default_capacity(limits(**values), group, AscendMoEConfig(**config)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({"comm": "all_to_all"}, ("all_to_all",)),
        ({"comm": "batched_all_to_all", "capacity": 9}, ("batched_all_to_all",)),
        (
            {"comm": "batched_all_to_all", "capacity": 9, "over_capacity": "rows"},
            ("batched_all_to_all", "all_to_all"),
        ),
        ({"comm": "auto", "capacity": 9}, ("padded_allgather", "all_to_all", "batched_all_to_all")),
        ({"comm": "mc2", **NPU}, ("mc2",)),
        ({"comm": "mc2", "over_capacity": "rows", **NPU}, ("mc2", "all_to_all")),
        ({"comm": "auto", **NPU}, ("padded_allgather", "all_to_all", "mc2", "uneven_allgather")),
        ({"comm": "auto", "exact": True, **NPU}, ("padded_allgather", "all_to_all", "uneven_allgather")),
        ({"comm": "uneven_allgather"}, ("uneven_allgather",)),
    ],
    ids=str,
)
def test_only_strategies_that_may_be_chosen_are_built(situation: dict[str, str], expected: tuple[str, ...]) -> None:
    assert possible_strategies(Situation(shape=SHAPE, **situation), 2) == expected


def test_mc2_without_npus_is_refused_when_layers_are_built() -> None:
    with pytest.raises(ConfigError, match=r"comm = 'mc2', but it must be another strategy between devices of type cpu"):
        possible_strategies(Situation(shape=SHAPE, comm="mc2"), 2)


def test_more_ranks_than_uneven_collectives_take_are_refused_when_layers_are_built() -> None:
    asked = Situation(shape=SHAPE, comm="uneven_allgather", **NPU)
    assert possible_strategies(asked, 8) == ("uneven_allgather",)
    with pytest.raises(UnsupportedError, match=r"at most 8 ranks on atlas-a2, not 9. Choose"):
        possible_strategies(asked, 9)


def moe(ep: bool = True) -> SimpleNamespace:
    """The fields of a layer's configuration that the choice of a strategy depends on."""
    return SimpleNamespace(
        moe_parallel_config=SimpleNamespace(use_ep=ep),
        hidden_dim=64,
        num_experts=8,
        experts_per_token=2,
        in_dtype=torch.bfloat16,
    )


def test_situation_follows_from_layer_limits_and_configuration() -> None:
    config = AscendMoEConfig(comm="auto", quantize_dispatch="int8", packed_bytes=7, max_tokens_across_dp=5)
    made = make_situation(moe(), limits(), "dp", config)
    assert made.shape == MoEShape(hidden_size=64, num_experts=8, top_k=2, element_bytes=2, payload="int8")
    assert (made.comm, made.capacity, made.packed_bytes) == ("auto", 5, 7)


def test_vllm_kernels_take_rows_only() -> None:
    made = make_situation(moe(), limits(), "dp", AscendMoEConfig(comm="auto", experts="vllm"))
    assert possible_strategies(made, 2) == ("padded_allgather", "all_to_all")
    assert made.capacity is None


@pytest.mark.parametrize(
    ("group", "ep", "splits"), [("dp", True, 4), ("pcp", True, 4), ("ep", True, 1), ("dp", False, 1)]
)
def test_where_tp_ranks_have_the_same_tokens_a_group_has_a_part_of_the_experts(
    group: str, ep: bool, splits: int
) -> None:
    assert make_situation(moe(ep), limits(tp=4), group, AscendMoEConfig()).shape.splits == splits


def test_without_expert_parallelism_only_all_gathers_can_work() -> None:
    assert make_situation(moe(ep=False), limits(), "dp", AscendMoEConfig(comm="auto")).comm == "padded_allgather"
    uneven = AscendMoEConfig(comm="uneven_allgather")
    assert make_situation(moe(ep=False), limits(), "dp", uneven).comm == "uneven_allgather"
    with pytest.raises(UnsupportedError, match="--enable-expert-parallel"):
        make_situation(moe(ep=False), limits(), "dp", AscendMoEConfig(comm="batched_all_to_all"))


def test_the_log_says_capacity_and_memory() -> None:
    batched = make_situation(moe(), limits(), "dp", AscendMoEConfig(comm="batched_all_to_all"))
    assert "capacity = 101 tokens a rank" in describe(batched, 2)
    assert "MiB of buffers" in describe(batched, 2)
    assert "capacity" not in describe(make_situation(moe(), limits(), "dp", AscendMoEConfig(comm="all_to_all")), 2)


def test_what_ranks_must_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(config: AscendMoEConfig, placement: ExpertPlacement | None) -> dict[str, object]:
        return must_agree(config, make_situation(moe(), limits(), "dp", config), placement)

    one = asked(AscendMoEConfig(comm="auto"), ExpertPlacement.linear(8, 2))
    assert one["additional_config.ascend_moe.comm"] == "auto"
    assert one["additional_config.ascend_moe.max_tokens_across_dp"] == 16
    # These may differ from rank to rank.
    assert asked(AscendMoEConfig(comm="auto", bind_cpus=False, experts="torch"), ExpertPlacement.linear(8, 2)) == one
    for config in ({"exact": True}, {"quantize_dispatch": "fp8"}, {"max_tokens_in_flight": 3}, {"packed_bytes": 0}):
        assert asked(AscendMoEConfig(comm="auto", **config), ExpertPlacement.linear(8, 2)) != one
    assert asked(AscendMoEConfig(comm="auto"), ExpertPlacement.round_robin(8, 2)) != one
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    assert asked(AscendMoEConfig(comm="auto"), ExpertPlacement.linear(8, 2)) == one, "no matter on a CPU"
    situation = make_situation(moe(), limits(), "dp", AscendMoEConfig(comm="auto"))
    for change in ({"hccl_buffer_mib": 300}, NPU):
        changed = replace(situation, **change)
        assert must_agree(AscendMoEConfig(comm="auto"), changed, ExpertPlacement.linear(8, 2)) != one
