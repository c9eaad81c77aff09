"""What ranks do in test_kill_rank.py; in a module of its own, since spawned processes import it by name."""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist

from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.comm.uneven_all_gather import UnevenAllGather
from vllm_ascend_moe.errors import CommError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup
from vllm_ascend_moe.placement import ExpertPlacement
from vllm_ascend_moe.testing import data

EXPERTS, HIDDEN, TOKENS = 8, 16, 5
VICTIM = 1
TIMEOUT_S = 5.0  # of each collective; more than a loaded machine delays a healthy rank

# A new strategy is one line here.
STRATEGIES = {
    "padded_allgather": lambda group, placement: PaddedAllGather(group),
    "all_to_all": AllToAll,
    "batched_all_to_all": lambda group, placement: BatchedAllToAll(group, placement, capacity=TOKENS),
    "uneven_allgather": lambda group, placement: UnevenAllGather(group),
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stall():
    """As a process that is stopped: alive, its connections open, and it comes to no collective any more."""
    time.sleep(3600)


# What an error may say it failed in, by where the victim is gone.
STEPS = {"dispatch": ("dispatch", "exchange of row counts"), "combine": ("combine",)}

FAULTS = {"killed": die, "stalled": stall}


def steps(rank, ranks, strategy, fault, where):
    """Layers without end; at the third one the victim is gone before or after its dispatch."""
    placement = ExpertPlacement.linear(EXPERTS, ranks)
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S), group_desc="ep")
    comm = STRATEGIES[strategy](TorchGroup(group), placement)
    layout = TokenLayout.of([TOKENS] * ranks, rank)
    tokens = data.token_ids(layout, rank)
    hidden = data.hidden_states(0, tokens, HIDDEN, torch.float32)
    weights, ids = data.topk_weights(0, tokens, 2), data.topk_ids(0, tokens, 2, EXPERTS)
    for step in range(1000):
        gone = rank == VICTIM and step == 2
        start = time.monotonic()
        try:
            if gone and where == "dispatch":
                FAULTS[fault]()
            sent = comm.dispatch(hidden, weights, ids, num_experts=EXPERTS, layout=layout)
            if gone and where == "combine":
                FAULTS[fault]()
            comm.combine(sent.hidden.clone(), sent.handle)
        except CommError as error:
            error.add_note(f"waited {time.monotonic() - start:.1f} s")
            raise
    return "nothing happened"
