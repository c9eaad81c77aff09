"""distribute_dispatch and distribute_combine, versions 1 and 2, between real processes, against loops over assignments.

Every rank makes the inputs of all ranks from a seed, and so knows alone what must arrive. Shapes and types are compared
with torch_npu's own host code on rank 0: the oracle needs no other rank, since nothing communicates there.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.softnpu.contract import contract
from vllm_ascend_moe.testing.launch import launch

H = 32


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. mask: None, "tokens" (1-D) or "assignments" (2-D)."""

    tokens: list[int]
    experts: int
    k: int
    version: int = 2
    quantise: bool = False
    smooth: bool = False
    mask: str | None = None
    one_expert: bool = False
    hierarchy: bool = False
    global_bs: int | None = None
    cumulative: bool = False
    weights_too: bool = False


def inputs(case: Case, seed: int):
    """x, ids, weights, active [BS, K] of every rank."""
    generator = torch.Generator().manual_seed(seed)
    ranks = []
    for tokens in case.tokens:
        x = torch.randn(tokens, H, generator=generator).bfloat16()
        ids = torch.stack([torch.randperm(case.experts, generator=generator)[: case.k] for _ in range(tokens)]).int()
        if case.one_expert:
            ids = torch.full((tokens, case.k), case.experts - 1, dtype=torch.int32)
        weights = torch.rand(tokens, case.k, generator=generator)
        active = torch.ones(tokens, case.k, dtype=torch.bool)
        if case.mask == "tokens":
            active[tokens // 2 :] = False
        elif case.mask == "assignments":
            active = torch.rand(tokens, case.k, generator=generator) < 0.5
            active[0] = False
        ranks.append((x, torch.where(active, ids, -1), weights, active))
    return ranks


def arriving(case: Case, ranks, rank: int, n: int):
    """(source rank, token, k) of every row that this rank's experts get, in order, and the rows of each expert."""
    local = case.experts // n
    rows, counts = [], []
    for expert in range(rank * local, (rank + 1) * local):
        mine = [(r, t, j) for r in range(n) for t, j in (ranks[r][1] == expert).nonzero().tolist()]
        rows += mine
        counts.append(len(mine))
    return rows, counts


def check_quantised(row: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Nearest integers; where float32 and float64 round a value near one half differently, either."""
    wanted = row.double().abs().max() / 127
    torch.testing.assert_close(scale, wanted.float())
    assert values.dtype == torch.int8
    assert ((values.double() - row.double() / wanted).abs() < 0.5 + 1e-4).all()


def expert_of(row: torch.Tensor, expert: int) -> torch.Tensor:
    return (row.float() * (expert + 1)).bfloat16()


def arguments(case: Case, rank: int, n: int, name: str) -> dict:
    world = {"group_ep": name, "ep_world_size": n, "ep_rank_id": rank, "moe_expert_num": case.experts}
    if case.hierarchy:
        world["comm_alg"] = "hierarchy"
    return {**world, "global_bs": max(case.tokens) * n if case.global_bs is None else case.global_bs}


def call(name: str, *args, **kwargs):
    """The operator ``npu::name``; on rank 0 also its contract."""
    if dist.get_rank() == 0:
        return contract(f"npu::{name}", *args, **kwargs)
    return getattr(torch.ops.npu, name)(*args, **kwargs)


def mask_of(case: Case, active: torch.Tensor):
    if case.mask is None:
        return None
    return (active.any(1) if case.mask == "tokens" else active).npu()


def suffix(case: Case) -> str:
    return "_v2" if case.version == 2 else ""


def dispatch(case: Case, mine, smooth, common: dict):
    x, ids, weights, active = mine
    given = {
        "x_active_mask": mask_of(case, active),
        "scales": None if smooth is None else smooth.npu(),
        "expert_scales": weights.npu() if case.weights_too else None,
        "quant_mode": 2 if case.quantise else 0,
        "expert_token_nums_type": 0 if case.cumulative else 1,
    }
    return call(f"npu_moe_distribute_dispatch{suffix(case)}", x.npu(), ids.npu(), **given, **common)


def combine(case: Case, mine, y, outputs, common: dict):
    _, ids, weights, active = mine
    index, counts, expand_scales = outputs[2], outputs[4], outputs[6]
    name = f"npu_moe_distribute_combine{suffix(case)}"
    given = {"x_active_mask": mask_of(case, active), "expand_scales": expand_scales if case.weights_too else None}
    # With a hierarchy, the weights that went with the rows count, and not these.
    weights = weights + 1 if "comm_alg" in common else weights
    return call(name, y, ids.npu(), index, counts, weights.npu(), **given, **common)


def round_trip(case: Case, rank: int, n: int, name: str, seed: int) -> None:
    ranks, common = inputs(case, seed), arguments(case, rank, n, name)
    smooth = torch.rand(case.experts, H, generator=torch.Generator().manual_seed(seed)) + 0.5 if case.smooth else None
    outputs = dispatch(case, ranks[rank], smooth, common)
    expand_x, scales, _, token_nums, _, _, expand_scales = (t.cpu() for t in outputs)
    rows, counts = arriving(case, ranks, rank, n)
    local = case.experts // n
    assert token_nums.dtype == torch.int64
    assert token_nums.tolist() == (torch.tensor(counts).cumsum(0).tolist() if case.cumulative else counts)
    y = torch.full((expand_x.shape[0], H), float("nan"), dtype=torch.bfloat16)
    for i, (r, t, j) in enumerate(rows):
        x, ids, weights, _ = ranks[r]
        if case.quantise:
            row = x[t].float() * (1 if smooth is None else smooth[ids[t, j]])
            check_quantised(row, expand_x[i], scales[i])
        else:
            assert torch.equal(expand_x[i], x[t])
        if case.weights_too:
            assert expand_scales[i] == weights[t, j]
        y[i] = expert_of(x[t], int(ids[t, j]))
    if not case.quantise:
        assert expand_x[len(rows) :].isnan().all()
    assert expand_x.shape[0] == common["global_bs"] * min(local, case.k) or common["global_bs"] == 0
    out = combine(case, ranks[rank], y.npu(), outputs, common).cpu()
    x, ids, weights, active = ranks[rank]
    assert out.dtype == torch.bfloat16
    for t in range(len(x)):
        if not active[t].any():
            assert out[t].isnan().all()
            continue
        wanted = sum(weights[t, j] * expert_of(x[t], int(ids[t, j])).float() for j in range(case.k) if active[t, j])
        torch.testing.assert_close(out[t], wanted.bfloat16())


def wrong_calls(rank: int, n: int, name: str) -> None:
    """Each is refused on every rank, and the next call works."""
    case = Case(tokens=[3] * n, experts=2 * n, k=2)
    ranks, common = inputs(case, 5), arguments(case, rank, n, name)

    def refused(message: str, **changed) -> None:
        with pytest.raises(RuntimeError, match=message):
            dispatch(case, ranks[rank], None, {**common, **changed})

    refused("ranks differ in global_bs", global_bs=n * (3 + rank))
    refused("shared_expert_rank_num = 1 is not emulated", shared_expert_rank_num=1)
    refused("zero_expert_num = 1 is not emulated", zero_expert_num=1)
    refused(f"rank {(rank + 1) % n} of {n}, but the communicator", ep_rank_id=(rank + 1) % n)
    refused("comm_alg = ring is not emulated", comm_alg="ring")
    refused("no communicator is called 'nowhere'", group_ep="nowhere")
    refused("moe_expert_num = 5 on", moe_expert_num=5)
    x, ids, weights, active = ranks[rank]
    with pytest.raises(RuntimeError, match="expert_ids has values"):
        dispatch(case, (x, torch.full_like(ids, 2 * n), weights, active), None, common)
    uneven = Case(tokens=[3 + r for r in range(n)], experts=2 * n, k=2, mask="tokens")
    mine = inputs(uneven, 6)[rank]
    with pytest.raises(RuntimeError, match="different numbers of tokens"):
        dispatch(uneven, mine, None, arguments(uneven, rank, n, name))
    mine = inputs(case, 5)[rank]
    outputs = list(dispatch(case, mine, None, common))
    outputs[2] = torch.zeros_like(outputs[2]) + n
    y = torch.zeros(outputs[0].shape, dtype=torch.bfloat16).npu()
    with pytest.raises(RuntimeError, match="assist_info_for_combine is not what dispatch returned"):
        combine(case, mine, y, outputs, common)


def too_many(rank: int, n: int, name: str) -> None:
    case = Case(tokens=[513] * n, experts=n, k=1)
    with pytest.raises(RuntimeError, match="513 tokens on a rank, not 1 to 512"):
        dispatch(case, inputs(case, 0)[rank], None, arguments(case, rank, n, name))


def cases_of(n: int, soc: str) -> list[Case]:
    even, uneven = [5] * n, [1 + 3 * r for r in range(n)]
    second = [
        Case(tokens=even, experts=2 * n, k=2),
        Case(tokens=even, experts=2 * n, k=2, global_bs=0),
        Case(tokens=uneven, experts=3 * n, k=3, cumulative=True),
        Case(tokens=even, experts=n, k=1, one_expert=True),
        Case(tokens=even, experts=2 * n, k=2, quantise=True),
        Case(tokens=uneven, experts=2 * n, k=2, quantise=True, smooth=True),
        Case(tokens=even, experts=2 * n, k=2, mask="tokens"),
        Case(tokens=[1] * n, experts=4 * n, k=4),
    ]
    if soc == "A3":
        second.append(Case(tokens=even, experts=2 * n, k=2, mask="assignments"))
        return second
    second.append(Case(tokens=even, experts=2 * n, k=2, weights_too=True))
    first = [replace(case, version=1) for case in (second[2], *second[4:])]
    return [*second, Case(tokens=uneven, experts=2 * n, k=2, weights_too=True, hierarchy=True), *first]


def everything(rank: int, n: int, soc: str) -> None:
    torch.npu.set_device(rank)
    dist.all_reduce(torch.zeros(1, device="npu"))
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    for seed, case in enumerate(cases_of(n, soc)):
        round_trip(case, rank, n, name, seed)
    wrong_calls(rank, n, name)
    too_many(rank, n, name)


@pytest.mark.parametrize(("n", "soc"), [(2, "A2"), (4, "A3")])
def test_there_and_back(n, soc, monkeypatch):
    monkeypatch.setenv("ASCEND_MOE_SOFTNPU_SOC", soc)
    launch(n, everything, soc, backend="hccl")
