"""What ranks do in test_testing_helpers.py; in a module of its own, since spawned processes import it by name."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def sum_of_ranks(rank, world_size, offset):
    for word in ("first ", "line of ", f"{rank}\nsecond line of {rank}\n", "begun"):
        sys.stdout.write(word)
        time.sleep(0.1)  # pieces of lines of two ranks, at the same time
    sys.stderr.write(f"fault line of {rank}\n")
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, world_size, int(total), torch.get_num_threads()


def one_raises_others_hang(rank, world_size):
    if rank == 1:
        raise KeyError("the token of rank 1")
    never_ends(rank, world_size)


def unpicklable(rank, world_size):
    return lambda: rank


def all_raise(rank, world_size):
    time.sleep(0.2 * rank)
    raise ValueError(f"fault of rank {rank}")


def one_dies_others_wait(rank, world_size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_leaves_early(rank, world_size):
    if rank == 0:
        os._exit(0)
    dist.barrier()


def never_ends(rank, world_size):
    while True:
        time.sleep(1)


def large_results(rank, world_size):
    return torch.full((1_000_000,), float(rank))
