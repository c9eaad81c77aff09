"""Padded forms beside vllm-ascend, on all ranks of a topology in one process: a whole MoE layer gives each token what
vllm-ascend's own forms give it, pad rows cost no expert, and everything else is left to vllm-ascend.

vllm-ascend is a stand-in (stand_in/); with the real one, real engines are compared in tests/softnpu_engines.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_ascend_moe.errors import LayoutError
from vllm_ascend_moe.integration.vllm_ascend import _replacements
from vllm_ascend_moe.integration.vllm_ascend_counts import keep_counts, tokens_across_dp
from vllm_ascend_moe.testing.fake_group import RankGroups, run_topology

H, E_L, K = 4, 2, 2
_OURS = "vllm_ascend_moe.integration.vllm_ascend_padded"
_FORWARD = "vllm_ascend_moe.integration.vllm_ascend_forward"
local = threading.local()


@dataclass
class Modules:
    """Our functions and the stand-in's, as imported under the patched vLLM."""

    ours: ModuleType
    forward: ModuleType
    strategy: ModuleType
    dispatcher: ModuleType


@pytest.fixture(scope="module")
def modules():
    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm_ascend"]:
            del sys.modules[name]
        for name in (_OURS, _FORWARD):
            sys.modules.pop(name, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
        import vllm.distributed
        import vllm.forward_context

        patch.setattr(vllm.forward_context, "get_forward_context", lambda: local.context)
        patch.setattr(vllm.forward_context, "is_forward_context_available", lambda: local.context is not None)
        for name in ("ep", "dp", "pcp"):
            patch.setattr(vllm.distributed, f"get_{name}_group", lambda name=name: getattr(local.groups, name))
        forget()
        ours = import_module(_OURS)
        strategy = import_module("vllm_ascend.ops.fused_moe.prepare_finalize")
        yield Modules(
            ours, sys.modules[_FORWARD], strategy, import_module("vllm_ascend.ops.fused_moe.token_dispatcher")
        )
        forget()


def replace(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that vllm_ascend.install replaces, but for the registrations of the operators."""
    for owner, name, function in _replacements(modules.ours):
        monkeypatch.setattr(owner, name, function)


@pytest.fixture
def installed(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> Modules:
    replace(modules, monkeypatch)
    return modules


@dataclass(frozen=True)
class Case:
    """Tokens of each DP rank, and the other groups' sizes."""

    counts: tuple[int, ...]
    tp: int = 1
    pcp: int = 1

    @property
    def padded_length(self) -> int:
        return -(-max(self.counts) // self.tp) * self.tp

    @property
    def experts(self) -> int:
        return E_L * len(self.counts) * self.tp * self.pcp

    def tokens(self, dp: int, pcp: int) -> torch.Tensor:
        """Hidden states of one DP x PCP rank [n, H]: whole numbers that name rank, token and column."""
        n = self.counts[dp]
        return (torch.arange(n)[:, None] * 8 + torch.arange(H) + 1000 * dp + 500 * pcp).float()

    def context(self, **changes: Any) -> SimpleNamespace:
        metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(self.counts, dtype=torch.int32))
        values = {
            "dp_metadata": metadata,
            "additional_kwargs": {},
            "flash_comm_v1_enabled": True,
            "padded_length": self.padded_length,
            "capturing": False,
            "moe_comm_type": None,
        }
        return SimpleNamespace(**{**values, **changes})

    def run(self, body: Any, **context: Any) -> list[Any]:
        """body(groups, dp, pcp, tp) on every rank, by EP rank."""

        def one(groups: RankGroups) -> Any:
            local.groups, local.context = groups, self.context(**context)
            return body(groups, groups.dp.rank_in_group, groups.pcp.rank_in_group, groups.tp.rank_in_group)

        return run_topology(one, dp_size=len(self.counts), pcp_size=self.pcp, tp_size=self.tp)


def shard(case: Case, dp: int, pcp: int, tp: int) -> torch.Tensor:
    """One rank's M rows, as sequence parallelism leaves them: zero pad at the end of the DP rank's rows."""
    tokens = case.tokens(dp, pcp)
    full = torch.cat([tokens, tokens.new_zeros(case.padded_length - len(tokens), H)])
    return full.chunk(case.tp)[tp] if len(full) else full


def route(hidden: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, K] int32 and weights [n, K] from the content alone, so that every rank routes a token alike."""
    first = (hidden.sum(1) / 4).long() % experts
    ids = torch.stack([first, (first + 1) % experts], 1).to(torch.int32)
    return ids, torch.tensor([0.25, 0.75]).expand(len(ids), K).clone()


def expert(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return hidden * (ids[:, None] + 1)


def dense(hidden: torch.Tensor, experts: int) -> torch.Tensor:
    """Every token's result, computed alone."""
    ids, weights = route(hidden, experts)
    return sum((expert(hidden, ids[:, k]) * weights[:, k : k + 1] for k in range(K)), torch.zeros_like(hidden))


def layer(modules: Modules, case: Case, groups: RankGroups, x: torch.Tensor, gate: bool = False) -> tuple[Any, int]:
    """One MoE layer through the stand-in's classes: (this rank's output [M, H], rows its experts computed)."""
    config = SimpleNamespace(pcp_size=case.pcp, dp_group=groups.dp)
    strategy = modules.strategy.PrepareAndFinalizeWithAllGather(config)
    strategy.multistream_overlap_gate = gate
    prepared = strategy._prepare_with_ep_group(x, x * 2, modules.strategy.QuantType.W8A8)
    hidden = prepared.hidden_states
    assert gate or torch.equal(prepared.router_logits, hidden * 2)
    assert torch.equal(prepared.pertoken_scale, hidden.abs().amax(1))
    ids, weights = route(hidden, case.experts)
    expert_map = torch.full((case.experts,), -1)
    here = groups.ep.rank_in_group * E_L
    expert_map[here : here + E_L] = torch.arange(E_L)
    dispatcher = modules.dispatcher.TokenDispatcherWithAllGather(E_L)
    routing = modules.dispatcher.MoERoutingParams(expert_map)
    row, chosen, scale = dispatcher.token_dispatch(
        modules.dispatcher.MoETokenDispatchInput(hidden, weights, ids, routing)
    )
    out = torch.zeros_like(hidden).index_add_(0, row, expert(hidden[row], chosen) * scale[:, None])
    assert strategy.moe_config is config
    return strategy._finalize_with_ep_group(out), len(row)


def check_layer(modules: Modules, case: Case, *, pad_is_zero: bool, gate: bool = False) -> int:
    """The layer's output at every token is the dense one; returns the rows that experts computed on all ranks."""
    results = case.run(lambda groups, dp, pcp, tp: layer(modules, case, groups, shard(case, dp, pcp, tp), gate))
    rows = case.padded_length // case.tp
    for rank, (out, _) in enumerate(results):
        dp, pcp, tp = rank // (case.pcp * case.tp), rank // case.tp % case.pcp, rank % case.tp
        wanted = dense(case.tokens(dp, pcp), case.experts)[tp * rows : (tp + 1) * rows]
        assert out.shape == (rows, H)
        assert torch.equal(out[: len(wanted)], wanted), f"rank {rank}"
        if pad_is_zero:
            assert not out[len(wanted) :].any(), f"rank {rank}: pad rows are not zero"
    return sum(computed for _, computed in results)


CASES = [
    Case((5, 2), tp=2),
    Case((1, 64), tp=1),
    Case((3, 1, 7), tp=2),
    Case((0, 2), tp=2),
    Case((1, 1, 1, 1), tp=3),
    Case((4, 4), tp=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_gets_what_vllm_ascend_gives_it(case: Case, modules: Modules, monkeypatch) -> None:
    """Theirs and ours against the dense layer; pad rows cost no expert in either, and ours leaves zeros in them."""
    tokens = sum(case.counts) * K
    assert check_layer(modules, case, pad_is_zero=False) == tokens
    replace(modules, monkeypatch)
    assert check_layer(modules, case, pad_is_zero=True) == tokens
    assert check_layer(modules, case, pad_is_zero=True, gate=True) == tokens


# The replaced modules are the same for all examples.
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 9), min_size=2, max_size=4), tp=st.integers(1, 3), pcp=st.integers(1, 2))
def test_any_counts(counts: list[int], tp: int, pcp: int, installed: Modules) -> None:
    """With PCP too, where vllm-ascend's own form cannot work: EP has PCP times the rows it cuts up."""
    case = Case(tuple(counts), tp=tp, pcp=pcp)
    assert check_layer(installed, case, pad_is_zero=True) == sum(counts) * K * pcp


def test_one_gather_for_each_tensor_and_one_reduce(installed: Modules) -> None:
    """Collectives of one layer, whatever the number of ranks: no loop over ranks is left."""
    for case in (Case((5, 2), tp=2), Case((1, 2, 3, 4, 5, 6), tp=2)):

        def body(groups, dp, pcp, tp, case=case):
            layer(installed, case, groups, shard(case, dp, pcp, tp))
            return [call.op for call in groups.ep.calls]

        assert case.run(body)[0] == ["all_gather"] * 3 + ["reduce_scatter"]


def test_input_ids_follow_the_rows(installed: Modules) -> None:
    """Hash routing: the id of each gathered row, -1 for pad, in the order of the hidden states; also with PCP."""
    for case in (Case((5, 2), tp=2), Case((1, 3), tp=2, pcp=2)):

        def body(groups, dp, pcp, tp, case=case):
            config = SimpleNamespace(pcp_size=case.pcp, dp_group=groups.dp)
            strategy = installed.strategy.PrepareAndFinalizeWithAllGather(config)
            tokens = case.tokens(dp, pcp)
            ids = strategy.all_gather_input_id_with_dp_group(tokens[:, 0].int())
            hidden = strategy._prepare_with_ep_group(*[shard(case, dp, pcp, tp)] * 2).hidden_states
            return ids, hidden[:, 0], local.context.additional_kwargs["ascend_moe_padded_forward"].layout

        for ids, column, layout in case.run(body):
            wanted = torch.where(layout.valid_rows(), column.int(), -1)
            assert torch.equal(ids, wanted)


def test_more_input_ids_than_rows_are_refused(installed: Modules) -> None:
    case = Case((3, 2))

    def body(groups, dp, pcp, tp):
        strategy = installed.strategy.PrepareAndFinalizeWithAllGather(SimpleNamespace(pcp_size=1, dp_group=groups.dp))
        return strategy.all_gather_input_id_with_dp_group(torch.arange(4))

    with pytest.raises(LayoutError, match=r"input_ids.shape\[0\] = 4.*at most padded_length = 3"):
        case.run(body)


def test_record_of_routed_experts_has_tokens_only(installed: Modules, monkeypatch) -> None:
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(installed.ours, "_capture", lambda self, layer_id, topk_ids: recorded.append(topk_ids))
    case = Case((3, 1), tp=2)
    ids = torch.arange(8 * K).reshape(8, K)

    def body(groups, dp, pcp, tp):
        installed.ours.RoutedExpertsCapturer.capture(None, 0, ids.clone())

    from vllm_ascend.ascend_forward_context import MoECommType

    case.run(body, moe_comm_type=MoECommType.ALLGATHER)
    assert all(torch.equal(rows, ids[[0, 1, 2, 4]]) for rows in recorded)
    recorded.clear()
    # The capturer goes by the metadata, which may count pad rows as tokens.
    case.run(
        body,
        moe_comm_type=MoECommType.ALLGATHER,
        dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=_agreed([4, 2], allow_dp_padding=True)),
    )
    assert all(torch.equal(rows, ids) for rows in recorded)
    recorded.clear()
    # Other strategies record this rank's own rows.
    case.run(body, moe_comm_type=MoECommType.MC2)
    assert all(torch.equal(rows, ids) for rows in recorded)


def test_layout_is_made_once_per_forward(installed: Modules, monkeypatch) -> None:
    made: list[list[int]] = []
    real = installed.forward.make_layout
    monkeypatch.setattr(installed.forward, "make_layout", lambda counts, n: made.append(counts) or real(counts, n))
    case = Case((5, 2), tp=2)

    def body(groups, dp, pcp, tp):
        for _ in range(3):
            layer(installed, case, groups, shard(case, dp, pcp, tp))
        if groups.ep.rank_in_group == 0:
            before = len(made)
            local.context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([4, 6]))
            assert installed.forward.padded_forward().layout.local_sizes == (3, 1, 3, 3)
            assert len(made) == before + 1
            return before
        return None

    case.run(body)
    assert sorted(map(tuple, made)) == [(4, 6)] + [(5, 2)] * 4


def test_while_a_graph_is_captured_counts_do_not_enter_it(installed: Modules) -> None:
    """Ids of pad rows stay as they are and outputs are not cut: the graph is replayed with other counts."""
    case = Case((3, 1), tp=2)

    def body(groups, dp, pcp, tp):
        return layer(installed, case, groups, shard(case, dp, pcp, tp) + 1)

    assert sum(rows for _, rows in case.run(body)) == 4 * K
    results = case.run(body, capturing=True)
    assert sum(rows for _, rows in results) == 8 * K
    assert all(out.any(1).all() for out, _ in results)


@pytest.mark.parametrize("case", [Case((3, 1), tp=2), Case((0, 2)), Case((2, 2))], ids=str)
def test_garbage_in_pad_rows_ends_with_the_layer(case: Case, installed: Modules) -> None:
    """Experts' output for pad rows may be anything, even NaN: this rank's rows come back with tokens and zeros only."""

    def body(groups, dp, pcp, tp):
        valid = installed.forward.padded_forward().layout.valid_rows()
        out = torch.where(valid[:, None], torch.ones(len(valid), H), float("nan"))
        return installed.ours.reduce(out, True), valid.chunk(groups.ep.world_size)[groups.ep.rank_in_group]

    for out, valid in case.run(body):
        assert torch.equal(out, valid[:, None].expand(-1, H) * float(case.tp * len(case.counts)))


def test_ids_stay_where_a_rank_has_all_experts(installed: Modules) -> None:
    """The routing operator would sort -1 to the front there instead of dropping it."""
    case, seen = Case((3, 1), tp=2), []

    def body(groups, dp, pcp, tp):
        ids = torch.zeros(8, K, dtype=torch.int32)
        routing = installed.dispatcher.MoERoutingParams(None)
        dispatcher = installed.dispatcher.TokenDispatcherWithAllGather(E_L)
        inputs = installed.dispatcher.MoETokenDispatchInput(torch.zeros(8, H), torch.ones(8, K), ids, routing)
        dispatcher.token_dispatch(inputs)
        seen.append(ids)

    case.run(body)
    assert not any(ids.any() for ids in seen)


@pytest.mark.parametrize(
    ("context", "arguments"),
    [
        ({"flash_comm_v1_enabled": False}, (True, True)),
        ({"dp_metadata": None}, (True, True)),
        ({"sp_by_pass": True}, (True, True)),
        ({}, (True, False)),
        ({}, (False, True)),
        ({}, (True,)),
    ],
    ids=["no-sp", "no-dp", "by-pass", "tp-gather", "no-gather", "default"],
)
def test_the_rest_is_left_to_vllm_ascend(context, arguments, installed: Modules, monkeypatch) -> None:
    """Every other use of the two operators reaches vllm-ascend's own function, with the arguments as given."""
    calls: list[tuple[Any, ...]] = []
    for name in ("_gather", "_gather_fake", "_reduce", "_reduce_fake"):
        monkeypatch.setattr(installed.ours, name, lambda *args, name=name: calls.append((name, *args[1:])) or args[0])
    case, x = Case((3, 1), tp=2), torch.ones(2, H)

    def body(groups, dp, pcp, tp):
        if groups.ep.rank_in_group:
            return
        label, ep = arguments[0], arguments[1] if len(arguments) > 1 else False
        assert installed.ours.gather(x, *arguments) is x
        assert installed.ours.gather_fake(x, *arguments) is x
        assert calls == [("_gather", label, ep), ("_gather_fake", label, ep)]
        calls.clear()
        if label:
            assert installed.ours.reduce(x, *arguments[1:]) is x
            assert installed.ours.reduce_fake(x, *arguments[1:]) is x
            assert calls == [("_reduce", ep), ("_reduce_fake", ep)]

    case.run(body, **context)


def test_without_a_forward_context(installed: Modules) -> None:
    local.context = None
    assert installed.forward.padded_forward() is None


@pytest.mark.parametrize("case", [*CASES, Case((3, 1), tp=2, pcp=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int32], ids=str)
def test_fakes_have_the_real_shapes(case: Case, dtype: torch.dtype, installed: Modules) -> None:
    rows = case.padded_length // case.tp

    def body(groups, dp, pcp, tp):
        for shape in ((rows,), (rows, 3), (rows, 2, 3)):
            x = torch.zeros(shape, dtype=dtype)
            real, fake = installed.ours.gather(x, True, True), installed.ours.gather_fake(x, True, True)
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())
            back, fake = installed.ours.reduce(real, True), installed.ours.reduce_fake(real, True)
            assert (back.shape, back.dtype, back.stride()) == (fake.shape, fake.dtype, fake.stride())
            assert back.shape == x.shape

    case.run(body)


@pytest.mark.parametrize("what", ["gather", "fc3_gather", "reduce"])
def test_wrong_rows_are_refused_before_the_collective(what: str, installed: Modules) -> None:
    case = Case((3, 1), tp=2)

    def body(groups, dp, pcp, tp):
        arguments = {"gather": (True, True), "fc3_gather": (), "reduce": (True,)}[what]
        getattr(installed.ours, what)(torch.zeros(3, H), *arguments)

    with pytest.raises(LayoutError, match=r"x.shape\[0\] = 3, but it must be .*max_local_size = [28]"):
        case.run(body)


def _agreed(counts: list[int], *, allow_dp_padding: bool, is_draft_model: bool = False, skipped: bool = False) -> Any:
    """What a model runner with vllm-ascend's signature, wrapped by us, returns as token counts."""

    class Runner:
        def _sync_metadata_across_dp(
            self,
            num_tokens: int,
            is_draft_model: bool = False,
            cudagraph_mode: str = "NONE",
            allow_dp_padding: bool = False,
        ) -> tuple[int, torch.Tensor | None, str]:
            if skipped:
                return num_tokens, None, cudagraph_mode
            agreed = [max(counts)] * len(counts) if allow_dp_padding or is_draft_model else counts
            return max(counts), torch.tensor(agreed, dtype=torch.int32), cudagraph_mode

    plain, wrapped = Runner(), type("Wrapped", (Runner,), {})
    keep_counts(wrapped)
    arguments = {"num_tokens": counts[0], "is_draft_model": is_draft_model, "cudagraph_mode": "mode"}
    results = [
        runner._sync_metadata_across_dp(**arguments, allow_dp_padding=allow_dp_padding) for runner in (plain, wrapped())
    ]
    assert str(results[0]) == str(results[1])
    return results[1][1]


def test_pad_rows_that_vllm_ascend_counts_as_tokens_cost_nothing_either(installed: Modules) -> None:
    """With sequence parallelism every DP rank is said to have the largest count; the true ones come from before it."""
    for true in ([6, 2], [2, 6, 0], [4, 4]):
        reported = _agreed(true, allow_dp_padding=True)
        assert reported.tolist() == [max(true)] * len(true)
        case, said = Case(tuple(true), tp=2), SimpleNamespace(num_tokens_across_dp_cpu=reported)

        def body(groups, dp, pcp, tp, case=case):
            _, rows = layer(installed, case, groups, shard(case, dp, pcp, tp))
            return rows, installed.forward.padded_forward().layout.num_tokens

        results = case.run(body, dp_metadata=said)
        assert sum(rows for rows, _ in results) == sum(true) * K
        assert {tokens for _, tokens in results} == {sum(true)}


def test_counts_as_reported_where_the_true_ones_do_not_fit(installed: Modules) -> None:
    """A graph's size or a dummy run makes all ranks larger than any true count; drafts and TP-only steps keep none."""
    reported = _agreed([6, 2], allow_dp_padding=True)
    assert tokens_across_dp(reported, 6, 2) == [6, 2]
    reported[:] = 8
    assert tokens_across_dp(reported, 8, 2) == [8, 8]
    assert tokens_across_dp(_agreed([6, 2], allow_dp_padding=False), 6, 2) == [6, 2]
    assert tokens_across_dp(_agreed([6, 2], allow_dp_padding=True, is_draft_model=True), 6, 2) == [6, 6]
    assert _agreed([6, 2], allow_dp_padding=True, skipped=True) is None


@pytest.mark.parametrize("padded_length", [3, 2], ids=["not-a-multiple-of-tp", "too-short"])
def test_contradictory_counts_are_refused(padded_length: int, installed: Modules) -> None:
    case = Case((3, 1), tp=2)
    with pytest.raises(LayoutError, match="num_tokens_across_dp"):
        case.run(lambda *_: installed.forward.padded_forward(), padded_length=padded_length)
