"""Real ProcessGroupHCCL between processes, over the emulated HCCL."""

import os

import pytest
import torch
import torch.distributed as dist

from vllm_ascend_moe.testing.launch import launch


def ranked(n, per_rank, value):
    """``value(r)`` in ``per_rank(r)`` rows of two, rank after rank."""
    return torch.cat([torch.full((per_rank(r), 2), float(value(r))) for r in range(n)])


def gathers_and_scatters(rank, n):
    x = torch.full((3, 4), rank + 1.0, device="npu", dtype=torch.bfloat16)
    gathered = torch.empty(3 * n, 4, device="npu", dtype=torch.bfloat16)
    dist.all_gather_into_tensor(gathered, x)
    assert gathered.cpu()[::3, 0].tolist() == [r + 1 for r in range(n)]
    shard = torch.empty_like(x)
    dist.reduce_scatter_tensor(shard, gathered)
    assert (shard.cpu() == (rank + 1) * n).all()
    pieces = [torch.empty(2, device="npu") for _ in range(n)]
    dist.all_gather(pieces, torch.full((2,), float(rank), device="npu"))
    assert [p[0].item() for p in pieces] == list(range(n))
    mine = torch.empty(2, device="npu")
    parts = [torch.full((2,), float(r), device="npu") for r in range(n)] if rank == 0 else None
    dist.scatter(mine, parts, src=0)
    assert mine[0].item() == rank


def uneven_gathers_and_scatters(rank, n):
    from torch_npu.distributed import all_gather_into_tensor_uneven, reduce_scatter_tensor_uneven

    sizes = [(r + 1) % n for r in range(n)]  # one rank has nothing
    want = ranked(n, lambda r: sizes[r], lambda r: r)
    given = torch.empty(len(want), 2, device="npu")
    mine = torch.full((sizes[rank], 2), float(rank), device="npu")
    all_gather_into_tensor_uneven(given, mine, output_split_sizes=sizes)
    assert torch.equal(given.cpu(), want)
    reduce_scatter_tensor_uneven(mine, given, input_split_sizes=sizes)
    assert (mine.cpu() == rank * n).all()


def reductions(rank, n):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64):
        x = torch.tensor([rank, -rank, 1], device="npu", dtype=dtype)
        dist.all_reduce(x)
        assert x.tolist() == [n * (n - 1) / 2, -n * (n - 1) / 2, n]
    x = torch.tensor([rank, -rank], device="npu")
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    assert x.tolist() == [n - 1, 0]
    x = torch.tensor([rank + 2.0], device="npu")
    dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
    assert x.item() == torch.arange(2.0, n + 2).prod()
    x = torch.ones(2, device="npu")
    dist.reduce(x, 0)
    assert rank > 0 or x[0].item() == n
    # Larger than a slot, and no multiple of its size.
    large = torch.arange(600_001, device="npu", dtype=torch.float32) + rank
    dist.all_reduce(large)
    assert torch.equal(large.cpu(), torch.arange(600_001.0) * n + n * (n - 1) / 2)


def all_to_alls(rank, n):
    sends, receives = [(rank + d) % 3 for d in range(n)], [(s + rank) % 3 for s in range(n)]
    send = torch.cat([torch.full((sends[d], 5), rank * 10.0 + d) for d in range(n)]).npu()
    received = torch.empty(sum(receives), 5, device="npu")
    dist.all_to_all_single(received, send, receives, sends)
    want = torch.cat([torch.full((receives[s], 5), s * 10.0 + rank) for s in range(n)])
    assert torch.equal(received.cpu(), want)
    even = torch.empty(2 * n, device="npu")
    dist.all_to_all_single(even, torch.arange(2.0 * n, device="npu") + 100 * rank)
    assert even.view(n, 2).cpu()[:, 0].tolist() == [100 * s + 2 * rank for s in range(n)]


def broadcasts_and_objects(rank, n):
    x = torch.full((300_001,), float(rank), device="npu")
    dist.broadcast(x, src=n - 1)
    assert (x.cpu() == n - 1).all()
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(n)]
    dist.barrier()


def point_to_point(rank, n):
    after, before = (rank + 1) % n, (rank - 1) % n
    out = torch.full((100_000,), float(rank), device="npu")  # more than a mailbox holds
    came = torch.empty_like(out)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, came, before)])
    for work in works:
        work.wait()
    assert (came.cpu() == before).all()
    if rank == 0:
        dist.send(out, 1)
    if rank == 1:
        dist.recv(came, 0)
        assert (came.cpu() == 0).all()


def subgroups(rank, n):
    groups = [dist.new_group([first, first + 1]) for first in range(0, n, 2)]
    group = groups[rank // 2]
    x = torch.tensor([float(rank)], device="npu")
    dist.all_reduce(x, group=group)
    assert x.item() == 4 * (rank // 2) + 1
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank(group))


def everything(rank, n):
    torch.npu.set_device(rank)
    gathers_and_scatters(rank, n)
    uneven_gathers_and_scatters(rank, n)
    reductions(rank, n)
    all_to_alls(rank, n)
    broadcasts_and_objects(rank, n)
    point_to_point(rank, n)
    return subgroups(rank, n)


@pytest.mark.parametrize("n", [2, 4])
def test_process_group(n):
    before = set(os.listdir("/dev/shm"))
    names = launch(n, everything, backend="hccl")
    assert [names.count(name) for name in names] == [2] * n
    left = {name for name in set(os.listdir("/dev/shm")) - before if "softnpu" in name}
    assert not left
