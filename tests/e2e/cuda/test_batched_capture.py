"""The batched strategy with Triton experts inside a CUDA graph, over NCCL on one GPU and on two; the host never waits.

pytest tests/e2e/cuda/test_batched_capture.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.comm import batched_rows
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.experts.batched_triton import TritonBatchedExperts
from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data
from vllm_ascend_moe.testing.compare import assert_close, assert_equal
from vllm_ascend_moe.testing.launch import launch

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not GPUS, reason="needs a CUDA GPU; run there: pytest tests/e2e/cuda"),
]
EXPERTS, TOP_K, HIDDEN, INNER, CAPACITY = 7, 4, 256, 128, 16
REPLAYS = 5
SIZES = {"exactly C": [16, 16], "uneven": [5, 12], "idle rank": [0, 7]}


@dataclass(frozen=True)
class Step:
    """One layer on this rank, with inputs at addresses that stay."""

    layout: TokenLayout
    hidden: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    scales: torch.Tensor | None

    @staticmethod
    def make(sizes: list[int], rank: int, quantized: bool) -> Step:
        n, device = sizes[rank], torch.device("cuda", torch.cuda.current_device())
        return Step(
            TokenLayout.of(sizes, rank),
            torch.zeros(n, HIDDEN, dtype=torch.int8 if quantized else torch.bfloat16, device=device),
            torch.zeros(n, TOP_K, device=device),
            torch.full((n, TOP_K), -1, dtype=torch.int32, device=device),
            torch.ones(n, device=device) if quantized else None,
        )

    def fill(self, generator: torch.Generator) -> None:
        """New tokens and choices: some name an expert twice, some none."""
        if self.scales is None:
            self.hidden.copy_(torch.randn(self.hidden.shape, generator=generator))
        else:
            self.hidden.copy_(torch.randint(-127, 128, self.hidden.shape, generator=generator))
            self.scales.copy_((torch.rand(self.scales.shape, generator=generator) + 0.5) / 64)
        self.weights.copy_(torch.rand(self.weights.shape, generator=generator))
        self.ids.copy_(torch.randint(-1, EXPERTS + 1, self.ids.shape, generator=generator))

    def run(self, comm: BatchedAllToAll, local_weights) -> torch.Tensor:
        sent = comm.dispatch(
            self.hidden, self.weights, self.ids, num_experts=EXPERTS, layout=self.layout, scales=self.scales
        )
        y = TritonBatchedExperts().apply_batched(sent.hidden, sent.expert_num_tokens, local_weights, scales=sent.scales)
        return comm.combine(y, sent.handle)

    def dense(self, all_weights) -> torch.Tensor:
        x = self.hidden.float() if self.scales is None else self.hidden.float() * self.scales[:, None]
        return ReferenceExperts().apply(x, self.weights, self.ids, all_weights)


def _weights(experts: list[int], device: torch.device):
    made = data.expert_weights(0, experts, HIDDEN, INNER, torch.bfloat16)
    return type(made)(w13=made.w13.to(device), w2=made.w2.to(device))


def _poison(buffers: BufferCache) -> None:
    for buffer in buffers._buffers.values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 77)


def _setting(rank: int, ranks: int, exact: bool):
    placement = ExpertPlacement.linear(EXPERTS, ranks)
    comm = BatchedAllToAll(TorchGroup(dist.group.WORLD), placement, CAPACITY, exact=exact)
    device = torch.device("cuda", torch.cuda.current_device())
    return comm, _weights(placement.experts_of(rank), device), _weights(list(range(EXPERTS)), device)


def _capture_body(rank: int, ranks: int, sizes: list[int], quantized: bool, exact: bool) -> None:
    comm, local_weights, all_weights = _setting(rank, ranks, exact)
    comm.check_capacity_agrees()
    other = BatchedAllToAll(comm.group, comm.placement, CAPACITY, exact=exact)
    step, generator = Step.make(sizes, rank, quantized), torch.Generator().manual_seed(rank)
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step.run(comm, local_weights)
        stream.synchronize()
        graph, memory = torch.cuda.CUDAGraph(), comm.buffers.nbytes
        with torch.cuda.graph(graph):
            captured = step.run(comm, local_weights)
        assert comm.buffers.nbytes == memory, "a buffer was made while capturing"
        results = []
        for _ in range(REPLAYS):
            step.fill(generator)
            captured.fill_(float("nan"))
            _poison(comm.buffers)
            graph.replay()
            results.append((captured.clone(), step.run(other, local_weights), step.dense(all_weights)))
        # The graph holds the communicator: gone before the group is destroyed.
        del graph, captured
    comm.buffers.close()
    # Compared last, so that ranks stay together in collectives where a result is wrong.
    for replayed, eager, dense in results:
        assert_equal(replayed, eager, what="replay against eager")
        assert_close(replayed, dense, what="replay against the dense reference")


def _sync_body(rank: int, ranks: int, sizes: list[int]) -> str:
    """A layer with torch's check for synchronising calls on; then one such call, to see that the check works."""
    comm, local_weights, all_weights = _setting(rank, ranks, exact=False)
    step = Step.make(sizes, rank, quantized=False)
    step.fill(torch.Generator().manual_seed(rank))
    step.run(comm, local_weights)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step.run(comm, local_weights)
        try:
            step.ids.sum().item()
        except RuntimeError as error:
            caught = str(error)
        else:
            caught = "nothing"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(out, step.dense(all_weights), what="the step that was watched")
    return caught


CASES = {
    f"{name}, {variant}": (sizes, quantized, exact)
    for name, sizes in SIZES.items()
    for variant, quantized, exact in (("bf16", False, False), ("int8", True, False), ("exact", False, True))
}
NO_WAIT = "the host never waits"


def _body(rank: int, ranks: int) -> dict[str, str]:
    """All cases in one set of processes; by name "ok" or what is wrong. Ranks stay together after a wrong result."""
    report = {}
    for name, (sizes, quantized, exact) in CASES.items():
        try:
            _capture_body(rank, ranks, sizes[-ranks:], quantized, exact)
            report[name] = "ok"
        except AssertionError as error:
            report[name] = str(error)
    report[NO_WAIT] = _sync_body(rank, ranks, SIZES["uneven"][-ranks:])
    return report


@cache
def reports(ranks: int) -> list[dict[str, str]]:
    """One launch per R serves all its tests."""
    return launch(ranks, _body, backend="nccl")


# With one GPU two ranks share it, over NCCL's network transport on the loopback interface.
RANKS = [pytest.param(1, id="R=1"), pytest.param(2, id="R=2")]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_replays_right_with_new_data(ranks, name):
    """A replay with new tokens and routing equals an eager step of another object, and the dense reference."""
    assert [report[name] for report in reports(ranks)] == ["ok"] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_the_host_never_waits_for_the_device(ranks):
    """Nothing in a layer trips torch's check, which the call after it does."""
    for report in reports(ranks):
        assert "synchroniz" in report[NO_WAIT]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("rows", "experts", "local"), [(1, 1, 1), (100, 8, 3), (5000, 64, 16), (3000, 256, 256)])
def test_slots_are_those_of_plain_torch(rows, experts, local, id_dtype, monkeypatch):
    """Of one block of rows and of many; ids are a strided view, as in a gathered row of bytes."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-2, experts + 2, (rows, 11), generator=generator, dtype=id_dtype).cuda()[:, :TOP_K]
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(experts, generator=generator)[:local]] = torch.arange(local, dtype=torch.int32)
    assert batched_rows.form_on("cuda") == "triton"
    plans = []
    for form in ("triton", "torch"):
        monkeypatch.setattr(batched_rows, "form_on", lambda device_type, form=form: form)
        table = batched_rows.slot_table(expert_map.cuda(), local)
        plans.append(batched_rows.plan_slots(ids, table, local))
    for triton, plain in zip(*plans, strict=True):
        assert_equal(triton, plain)
