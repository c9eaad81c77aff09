"""Collectives that go wrong: every rank gets an error that says what happened, and nobody hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.testing.launch import RankFailedError, launch


def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def four_all_reduces(rank, n):
    """(error text, seconds) of four collectives; the last two have groups of their own, which the faults end."""
    torch.npu.set_device(rank)
    x = torch.ones(16, device="npu")
    everyone = list(range(n))
    results = []
    for group in (None, None, dist.new_group(everyone), dist.new_group(everyone)):
        begun = time.monotonic()
        error = error_of(lambda group=group: dist.all_reduce(x, group=group))
        results.append((error, time.monotonic() - begun))
    return results


def test_collectives_are_slow_fail_and_time_out_on_demand(monkeypatch):
    monkeypatch.setenv(
        "ASCEND_MOE_SOFTNPU_FAULTS",
        "collective_slow@2:rank=1:ms=2000,collective_fail@3:rank=1,collective_timeout@4:rank=1",
    )
    well, faulty = launch(2, four_all_reduces, backend="hccl")
    assert [error for error, _ in well[:2] + faulty[:2]] == [""] * 4
    assert min(well[1][1], faulty[1][1]) >= 0.5  # the other rank waits for the slow one, which is 2 s late
    assert "HcclAllReduce fails by ASCEND_MOE_SOFTNPU_FAULTS" in faulty[2][0]
    assert "HcclAllReduce times out by ASCEND_MOE_SOFTNPU_FAULTS" in faulty[3][0]
    for error, seconds in well[2:]:
        assert "rank 1 failed or gave up" in error
        assert seconds < 30


def mismatches(rank, n):
    """Each pair of calls that do not fit together, in a group of its own, since the first error ends a group."""
    torch.npu.set_device(rank)
    # Multiples of 32 bytes: ProcessGroupHCCL pads others, which would hide small differences.
    x, out = torch.ones(16, device="npu"), torch.empty(32, device="npu")
    half = x.half() if rank else x
    calls = {
        "size": lambda g: dist.all_reduce(x[: 16 - 8 * rank], group=g),
        "type": lambda g: dist.all_reduce(half, group=g),
        "operation": lambda g: dist.all_reduce(x, group=g) if rank else dist.all_gather_into_tensor(out, x, group=g),
        "root": lambda g: dist.broadcast(x, src=rank, group=g),
        "splits": lambda g: dist.all_to_all_single(out[: 3 + rank], x[:4], [2, 1 + rank], [2, 2], group=g),
    }
    groups = {name: dist.new_group(list(range(n))) for name in calls}
    return {name: error_of(lambda name=name: calls[name](groups[name])) for name in calls}


def test_calls_that_do_not_match_fail_on_every_rank():
    wanted = {
        "size": "rank 0 sends 64 bytes to rank 1, which expects 32",
        "type": "data type (HcclDataType) is 4 on rank 0 and 3 on rank 1",
        "operation": "operation (HcclCMDType) is 6 on rank 0 and 2 on rank 1",
        "root": "root is 0 on rank 0 and 1 on rank 1",
        "splits": "rank 1 sends 8 bytes to rank 0, which expects 4",
    }
    ranks = launch(2, mismatches, backend="hccl")
    for name, text in wanted.items():
        found = [errors[name] for errors in ranks]
        assert all(text in error or "failed or gave up" in error for error in found), (name, found)
        assert any(text in error for error in found), (name, found)


def one_dies(rank, n):
    torch.npu.set_device(rank)
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(x)


def test_a_rank_that_dies_is_noticed_and_leaves_nothing():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailedError) as caught:
        launch(2, one_dies, backend="hccl")
    assert caught.value.kinds[1] == "ProcessDied"
    assert "rank 1 (process" in str(caught.value)
    assert "has died" in str(caught.value)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "softnpu" in name or "hccl" in name]
