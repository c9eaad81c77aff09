"""The batched strategy on all ranks in one process: where every row goes, and that unwritten slots reach no token.

In native code and in plain torch. What is sent and kept is in test_batched_buffers.py, errors in
test_batched_errors.py, real processes with all strategies in test_all_strategies.py, with fast experts in
test_batched_processes.py, graphs in tests/e2e/cuda.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from batched_layers import NAN, SIZES, inputs, layer, poison, poison_unused
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_moe.comm import batched_rows
from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.experts import reference
from vllm_ascend_moe.experts.reference import ReferenceExperts, expert_mlp
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.extension import native_available
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_equal
from vllm_ascend_moe.testing.fake_group import run_ranks

FORMS = [
    pytest.param("native", marks=pytest.mark.skipif(not native_available(), reason="the extension is not built")),
    "torch",
]


@pytest.fixture
def form(request, monkeypatch):
    monkeypatch.setattr(batched_rows, "form_on", lambda device_type: request.param)
    return request.param


both_forms = pytest.mark.parametrize("form", FORMS, indirect=True)


@dataclass(frozen=True)
class Setting:
    """One layer: sizes, where experts live, and every token's choices (rank after rank)."""

    sizes: list[int]
    ranks_of_experts: list[int]
    top_k: int
    ids: list[list[int]]
    slack: int

    @property
    def placement(self):
        return ExpertPlacement.of(self.ranks_of_experts, len(self.sizes))

    @property
    def capacity(self):
        return max(1, max(self.sizes) + self.slack)


@st.composite
def settings_of_a_layer(draw):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    experts = draw(st.integers(1, 6))
    choices = st.sampled_from([*range(experts), -1, -9, experts, experts + 50])
    top_k = draw(st.integers(1, 4))
    return Setting(
        sizes,
        draw(st.lists(st.integers(-1, len(sizes) - 1), min_size=experts, max_size=experts)),
        top_k,
        # Choices repeat, and are -1, far below, E and far above.
        draw(st.lists(st.lists(choices, min_size=top_k, max_size=top_k), min_size=sum(sizes), max_size=sum(sizes))),
        draw(st.integers(0, 3)),
    )


def check_markers(rank, group, setting, id_dtype, exact):
    """Rows that hold their token's number: who gets which, in which order, and what comes back."""
    layout, placement = TokenLayout.of(setting.sizes, rank), setting.placement
    tokens = data.token_ids(layout, rank)
    all_ids = torch.tensor(setting.ids, dtype=id_dtype).view(sum(setting.sizes), setting.top_k)
    experts = placement.num_experts
    ids, weights = all_ids[tokens], 2.0 ** -torch.arange(setting.top_k).expand(len(tokens), -1)
    valid = (ids >= 0) & (ids < experts)
    comm = BatchedAllToAll(group, placement, setting.capacity, exact=exact)
    hidden = (tokens + 1)[:, None].expand(-1, 3).float()
    # One scale a token, or as many as it has elements: then both have the shape and dtype of one buffer.
    scales = hidden if exact else hidden[:, 0]
    for _ in range(2):
        sent = comm.dispatch(
            hidden.masked_fill(~valid.any(1, keepdim=True), NAN),
            weights.masked_fill(~valid, NAN),
            ids,
            num_experts=experts,
            layout=layout,
            scales=scales,
        )
        local = placement.experts_of(rank)
        rows = setting.capacity * len(setting.sizes)
        assert sent.hidden.shape == (len(local), rows, 3)
        assert sent.scales.shape == (len(local), rows, *scales.shape[1:])
        assert sent.scales.data_ptr() != sent.hidden.data_ptr() or not local
        assert sent.expert_num_tokens.shape == (len(local),)
        assert sent.expert_num_tokens.dtype == torch.int32
        for slot, expert in enumerate(local):
            # Tokens are numbered by source rank, then by token: the order experts see them in.
            wanted = [token + 1 for token, chosen in enumerate(all_ids.tolist()) if expert in chosen]
            assert sent.expert_num_tokens[slot] == len(wanted)
            assert sent.hidden[slot, : len(wanted), 0].tolist() == wanted
            assert sent.scales[slot, : len(wanted)].flatten().unique().tolist() == wanted
        gains = torch.tensor(local, dtype=torch.float32)[:, None, None] + 1
        y = poison_unused(sent.hidden * gains, sent.expert_num_tokens)
        out = comm.combine(y, sent.handle)
        share = torch.zeros(len(tokens))
        for expert, owner in enumerate(setting.ranks_of_experts):
            if owner >= 0:
                share += (weights * (ids == expert)).sum(1) * (expert + 1)
        assert_equal(out, hidden * share[:, None])  # powers of two and small integers: exact in any order
        poison(comm.buffers)


@pytest.mark.parametrize("form", FORMS)
def test_every_expert_gets_its_tokens_in_order_and_they_come_back(form, monkeypatch):
    monkeypatch.setattr(batched_rows, "form_on", lambda device_type: form)

    @settings(max_examples=60)
    @given(setting=settings_of_a_layer(), id_dtype=st.sampled_from([torch.int32, torch.int64]), exact=st.booleans())
    def check(setting, id_dtype, exact):
        run_ranks(len(setting.sizes), lambda rank, group: check_markers(rank, group, setting, id_dtype, exact))

    check()


@given(setting=settings_of_a_layer(), rank=st.integers(0, 3))
@pytest.mark.skipif(not native_available(), reason="the extension is not built")
def test_native_and_plain_torch_plan_the_same_slots(setting, rank):
    placement = setting.placement
    mine = placement.expert_map(rank % placement.ep_size)
    local = placement.local_counts[rank % placement.ep_size]
    ids = torch.tensor(setting.ids or [[-1]])
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        for form in ("native", "torch"):
            patch.setattr(batched_rows, "form_on", lambda device_type, form=form: form)
            plans.append(batched_rows.plan_slots(ids, batched_rows.slot_table(mine, local), local))
    for native, plain in zip(*plans, strict=True):
        assert_equal(native, plain)
        assert native.is_contiguous()
        assert plain.is_contiguous()


def row_by_row(x, weights, expert, activation):
    return torch.cat([x[:0], *(expert_mlp(row, weights, expert, activation) for row in x.split(1))])


@both_forms
@pytest.mark.parametrize("seed", range(3))
def test_exact_gives_the_bits_of_all_to_all_by_row_on_the_reference_experts(form, seed, monkeypatch):
    """fp32; a token that names an expert twice too: its two products are added one after the other by both.

    Such a token is two rows to one format and one to the other, and how many rows a matrix product has may decide how
    it rounds (MKL without AVX-512): so experts take each row alone."""
    monkeypatch.setattr(reference, "expert_mlp", row_by_row)

    def body(rank, group):
        placement = ExpertPlacement.round_robin(7, 3)
        layout = TokenLayout.of(SIZES, rank)
        given = inputs(layout, num_experts=7, top_k=5, hidden_size=16)
        tokens = data.token_ids(layout, rank)
        given["topk_ids"] = data.topk_ids(seed, tokens, 5, 7, invalid_share=0.2)
        given["topk_ids"][:, 4] = given["topk_ids"][:, 0]
        batched = layer(BatchedAllToAll(group, placement, 5, exact=True), given)
        rows = AllToAll(group, placement, exact=True)
        sent = rows.dispatch(**given)
        y = ReferenceExperts().apply(
            sent.hidden,
            sent.topk_weights,
            sent.topk_ids,
            data.expert_weights(0, placement.experts_of(rank), 16, 8),
            expert_map=placement.expert_map(rank),
        )
        assert_equal(batched, rows.combine(y, sent.handle))

    run_ranks(3, body)


@both_forms
def test_without_exact_16_bit_sums_are_rounded_once_a_rank_and_once_at_home(form):
    """bf16: each rank sends its fp32 sum rounded to bf16; the sum of those in fp32 is rounded once."""

    def body(rank, group):
        layout = TokenLayout.of([1, 1, 1], rank)
        placement = ExpertPlacement.linear(6, 3)
        given = inputs(layout, top_k=6, dtype=torch.bfloat16) | {"topk_ids": torch.arange(6, dtype=torch.int32)[None]}
        results = []
        for exact in (False, True):
            comm = BatchedAllToAll(group, placement, 1, exact=exact)
            sent = comm.dispatch(**given)
            gains = torch.tensor(placement.experts_of(rank))[:, None, None] + 1
            results.append(comm.combine((sent.hidden * gains).bfloat16(), sent.handle))
        w, x = given["topk_weights"], given["hidden"]
        products = [(x * (e + 1)).bfloat16().float() * w[:, e : e + 1] for e in range(6)]
        partial = [products[i] + products[i + 1] for i in (0, 2, 4)]
        assert_equal(results[0], sum(p.bfloat16().float() for p in partial).bfloat16())
        assert_equal(results[1], sum(partial).bfloat16())

    run_ranks(3, body)


def test_every_way_to_count_is_used():
    """Of 200 drawn routings: experts named twice, with no token, and by all tokens occur (for the property test)."""
    seen = Counter()

    @settings(max_examples=200, database=None)
    @given(setting=settings_of_a_layer())
    def look(setting):
        chosen = [set(ids) for ids in setting.ids]
        seen["twice"] += any(len(set(ids)) < len(ids) for ids in setting.ids)
        for expert, rank in enumerate(setting.ranks_of_experts):
            takers = sum(expert in ids for ids in chosen)
            seen["none"] += takers == 0
            seen["all"] += bool(chosen) and takers == len(chosen)
            seen["nowhere"] += rank < 0 and takers > 0
        seen["no local expert"] += any(count == 0 for count in setting.placement.local_counts)

    look()
    assert all(seen[name] > 10 for name in ("twice", "none", "all", "nowhere", "no local expert")), seen
