"""Captured graphs really replay: recorded work runs again, on the memory of the capture and its contents at replay."""

import subprocess
import sys

import pytest
import torch
import torch_npu


def captured(function):
    """A graph of ``function()`` and the tensors it returned."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function()
    return graph, result


def test_replay_reads_new_contents():
    x = torch.zeros(2, 8, device="npu")
    gamma = torch.ones(8, device="npu")

    def step():
        y = (x * 2 + 1).relu_()
        y[0].add_(1)  # in place, through a view
        normed, _ = torch_npu.npu_rms_norm(y, gamma, 1e-6)
        return y, normed, torch.cat([y, normed])[:, :3].t()

    graph, (y, normed, part) = captured(step)
    assert y.isnan().all()  # nothing ran while it was captured
    for seed in (0, 1):
        torch.manual_seed(seed)
        fresh = torch.randn(2, 8)
        x.copy_(fresh)
        graph.replay()
        want = (fresh * 2 + 1).relu()
        want[0] += 1
        want_normed = want * (want.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(y.cpu(), want)
        torch.testing.assert_close(normed.cpu(), want_normed)
        torch.testing.assert_close(part.cpu(), torch.cat([want, want_normed])[:, :3].t())


def test_capture_changes_nothing():
    counter = torch.zeros(3, device="npu")
    graph, _ = captured(lambda: counter.add_(1))
    assert counter.tolist() == [0, 0, 0]
    graph.replay()
    graph.replay()
    assert counter.tolist() == [2, 2, 2]


def test_copies_and_side_streams_are_recorded():
    x = torch.ones(4, device="npu")
    out = torch.zeros(4, device="npu")
    side = torch.npu.Stream()

    def step():
        here = torch.npu.current_stream()
        side.wait_stream(here)
        with torch.npu.stream(side):
            y = x * 3
        here.wait_stream(side)
        out.copy_(y)

    graph, _ = captured(step)
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [6, 6, 6, 6]


def test_outputs_into_existing_tensors_and_lists():
    x = torch.arange(6.0, device="npu").view(2, 3)
    total = torch.zeros(3, device="npu")

    def step():
        torch.sum(x, 0, out=total)
        torch._foreach_mul_([x], 2.0)
        return x.split(1)

    graph, (first, _) = captured(step)
    graph.replay()
    assert total.tolist() == [3, 5, 7]
    graph.replay()
    assert total.tolist() == [6, 10, 14]
    assert first.tolist() == [[0, 4, 8]]


def test_what_cannot_be_captured_is_refused():
    x = torch.ones(3, device="npu")
    for wrong in (lambda: x.sum().item(), torch.npu.synchronize, lambda: x.cpu()):
        graph = torch.npu.NPUGraph()
        with pytest.raises(RuntimeError, match="captur"), torch.npu.graph(graph):
            wrong()
    assert x.sum().item() == 3  # and the device works on


def test_random_numbers_differ_between_replays():
    graph, noise = captured(lambda: torch.rand(8, device="npu"))
    graph.replay()
    first = noise.cpu()
    graph.replay()
    assert not torch.equal(first, noise.cpu())


def test_indices_computed_inside_the_graph():
    table = torch.arange(5, device="npu") * 10
    ids = torch.zeros(3, dtype=torch.int64, device="npu")
    graph, picked = captured(lambda: table.index_select(0, ids.clamp(0, 3) + 1))
    for fresh in ([0, 3, 1], [2, 9, -1]):
        ids.copy_(torch.tensor(fresh))
        graph.replay()
        assert picked.tolist() == [10 * (min(max(i, 0), 3) + 1) for i in fresh]


FAILING = """
import sys
import torch

x = torch.ones(3, device="npu")
graphs = [torch.npu.NPUGraph() for _ in range(3)]  # live to the end of the process
for graph, wrong in zip(graphs, (lambda y: y.sum().item(), lambda y: torch.npu.synchronize())):
    try:
        with torch.npu.graph(graph):
            wrong(x * 2)
    except RuntimeError as error:
        assert "captur" in str(error)
        print("refused")
with torch.npu.graph(graphs[2]):
    z = x + torch.rand(3, device="npu").ceil()
graphs[2].replay()
print(z.tolist())
sys.exit(7)
"""


def test_a_process_goes_on_after_failed_captures_and_ends_with_its_own_exit_code():
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-4:] == ["refused", "refused", "[2.0, 2.0, 2.0]", ""]
    assert done.returncode == 7, done.stderr[-2000:]
