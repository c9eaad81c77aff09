"""Layouts of one forward, and which group a layer uses, for every topology. Groups are replaced by their rank and size
(what the code reads of them); real groups are used by the engine tests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.forward_context import DPMetadata
from vllm.model_executor.layers.fused_moe import FusedMoEParallelConfig

from vllm_ascend_moe.errors import LayoutError, UnsupportedError
from vllm_ascend_moe.integration import forward_state
from vllm_ascend_moe.integration.forward_state import communication_group, make_forward_layouts
from vllm_ascend_moe.ops.forward_layouts import ForwardLayouts


@dataclass
class Ranks:
    rank_in_group: int
    world_size: int


def layer(dp: int = 1, tp: int = 1, pcp: int = 1, *, ep: bool = True, sp: bool = False) -> FusedMoEParallelConfig:
    return FusedMoEParallelConfig(
        tp_size=1 if ep else tp * dp,
        pcp_size=pcp,
        dp_size=dp,
        ep_size=dp * tp * pcp if ep else 1,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=0,
        ep_rank=0,
        sp_size=tp if sp else 1,
        use_ep=ep,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )


@pytest.mark.parametrize(
    ("config", "tp", "expected"),
    [
        (layer(dp=2, tp=2, sp=True), 2, "ep"),
        (layer(dp=2, tp=2), 2, "dp"),
        (layer(dp=2), 1, "dp"),
        (layer(dp=2, ep=False), 1, "dp"),
        (layer(dp=2, pcp=2), 1, "ep"),
        (layer(pcp=2), 1, "pcp"),
        (layer(pcp=2, ep=False), 1, None),
        (layer(tp=2), 2, None),
        (layer(), 1, None),
    ],
    ids=["sp", "dp-tp", "dp", "dp-no-ep", "dp-pcp", "pcp", "pcp-no-ep", "tp", "one-rank"],
)
def test_group_of_a_layer(config: FusedMoEParallelConfig, tp: int, expected: str | None) -> None:
    assert communication_group(config, tp) == expected


def test_dp_pcp_and_tp_without_sp_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="tensor_parallel_size = 2 needs sequence-parallel MoE"):
        communication_group(layer(dp=2, tp=2, pcp=2), 2)


@pytest.fixture
def set_ranks(monkeypatch: pytest.MonkeyPatch):
    def replace(dp: Ranks, pcp: Ranks, tp: Ranks) -> None:
        for name, ranks in (("get_dp_group", dp), ("get_pcp_group", pcp), ("get_tp_group", tp)):
            monkeypatch.setattr(forward_state, name, lambda ranks=ranks: ranks)

    return replace


@pytest.mark.parametrize(("dp", "pcp", "tp"), list(product((2, 3), (1, 2), (1, 2, 4))))
def test_every_rank_agrees_with_vllm(dp: int, pcp: int, tp: int, set_ranks) -> None:
    """Sizes are those vLLM reports (0.31 and later) under sequence parallelism, and ranks are numbered 0..R-1."""
    counts = [5, 0, 9][:dp]
    metadata = DPMetadata(torch.tensor(counts, dtype=torch.int32))
    config = ParallelConfig(enable_expert_parallel=True)
    config.prefill_context_parallel_size = pcp
    with metadata.sp_local_sizes(tp, pcp_size=pcp, use_ep=True) as expected:
        expected = tuple(expected)
    seen = []
    for dp_rank, pcp_rank, tp_rank in product(range(dp), range(pcp), range(tp)):
        set_ranks(Ranks(dp_rank, dp), Ranks(pcp_rank, pcp), Ranks(tp_rank, tp))
        layouts = make_forward_layouts(config, metadata, counts[dp_rank])
        assert layouts.by_group["ep"].local_sizes == expected
        assert layouts.by_group["dp"].local_sizes == tuple(counts)
        assert layouts.by_group["dp"].rank == dp_rank
        seen.append(layouts.by_group["ep"].rank)
    assert seen == list(range(dp * pcp * tp))


def test_without_ep_the_dp_group_sees_what_pcp_gathered(set_ranks) -> None:
    set_ranks(Ranks(1, 2), Ranks(0, 2), Ranks(0, 1))
    config = ParallelConfig()
    config.prefill_context_parallel_size = 2
    layouts = make_forward_layouts(config, DPMetadata(torch.tensor([5, 3])), 3)
    assert layouts.by_group["dp"].local_sizes == (10, 6)


def test_without_dp_only_pcp_has_a_layout(set_ranks) -> None:
    set_ranks(Ranks(0, 1), Ranks(1, 2), Ranks(0, 1))
    config = ParallelConfig(enable_expert_parallel=True)
    assert make_forward_layouts(config, None, 4).by_group == {}
    config.prefill_context_parallel_size = 2
    layout = make_forward_layouts(config, None, 4).by_group["pcp"]
    assert (layout.local_sizes, layout.rank) == ((4, 4), 1)


def test_active_group_is_restored_and_a_missing_one_is_named() -> None:
    layouts = ForwardLayouts()

    def failing_layer() -> None:
        with layouts.use("dp"):
            assert layouts.active == "dp"
            raise RuntimeError("layer failed")

    with pytest.raises(RuntimeError, match="layer failed"):
        failing_layer()
    assert layouts.active is None
    with pytest.raises(LayoutError, match="group = None"):
        layouts.layout()
    with layouts.use("ep"), pytest.raises(LayoutError, match="group = 'ep'"):
        layouts.layout()


def test_no_layouts_is_an_error_that_says_where_to_run_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_state, "get_forward_context", lambda: SimpleNamespace(additional_kwargs={}))
    with pytest.raises(LayoutError, match="Run the layer inside vLLM's set_forward_context"):
        forward_state.current_layouts()
