"""Inputs and whole layers of the batched strategy, for its tests on all ranks in one process."""

from functools import partial

import rows_layers
import torch

from vllm_ascend_moe.experts.reference import ReferenceExperts
from vllm_ascend_moe.testing import data

NAN = float("nan")
SIZES = [3, 1, 4]
inputs = partial(rows_layers.inputs, num_experts=6)


def poison(buffers):
    for buffer in buffers._buffers.values():
        buffer.fill_(NAN if buffer.is_floating_point() else 77)


def poison_unused(x, counts):
    unused = torch.arange(x.shape[1]) >= counts[:, None]
    return x.masked_fill(unused[..., None], NAN)


def layer(comm, given):
    """Dispatch, reference experts with NaN in what they do not write, combine."""
    rank = comm.group.rank_in_group
    weights = data.expert_weights(0, comm.placement.experts_of(rank), given["hidden"].shape[1], 8)
    sent = comm.dispatch(**given)
    hidden = poison_unused(sent.hidden, sent.expert_num_tokens)
    y = ReferenceExperts().apply_batched(hidden, sent.expert_num_tokens, weights)
    return comm.combine(y, sent.handle)
