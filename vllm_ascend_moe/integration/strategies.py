"""The strategies of one MoE layer, from configuration, vLLM's limits and the layer's sizes.

Symbols: C capacity, the most tokens one rank of the group sends in one pass; R ranks of the group.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from vllm_ascend_moe.comm.all_gather import DEFAULT_PACKED_BYTES
from vllm_ascend_moe.comm.all_to_all import AllToAll
from vllm_ascend_moe.comm.base import ActivationFormat, TokenComm
from vllm_ascend_moe.comm.batched_all_to_all import BatchedAllToAll
from vllm_ascend_moe.comm.buffers import BufferCache
from vllm_ascend_moe.comm.cost_model import STRATEGIES, MoEShape, Strategy
from vllm_ascend_moe.comm.links import Link, link_of
from vllm_ascend_moe.comm.mc2 import MC2, own_group
from vllm_ascend_moe.comm.mc2_limits import DEFAULT_BUFFER_MIB, PRODUCTS, buffer_mib_given, most_tokens
from vllm_ascend_moe.comm.padded_all_gather import PaddedAllGather
from vllm_ascend_moe.comm.payload import QuantizedDispatch
from vllm_ascend_moe.comm.select import price, select
from vllm_ascend_moe.comm.situation import Situation, mc2_sizes, obstacle_to
from vllm_ascend_moe.comm.uneven_all_gather import UnevenAllGather
from vllm_ascend_moe.config import SECTION, AscendMoEConfig
from vllm_ascend_moe.errors import UnsupportedError
from vllm_ascend_moe.ops.forward_layouts import GroupName
from vllm_ascend_moe.ops.native import Group
from vllm_ascend_moe.placement import ExpertPlacement

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig


# By group, of this process: all layers of a group share them.
_buffers: dict[GroupName, BufferCache] = {}


def buffers_of(name: GroupName) -> BufferCache:
    """The buffers that all layers of a group share in this process; the worker closes them when it ends."""
    return _buffers.setdefault(name, BufferCache())


def describe_buffers() -> str:
    """What the buffers of each group are and how large; empty where there are none."""
    used = {name: cache for name, cache in _buffers.items() if cache.nbytes}
    return "\n".join(f"Buffers of dispatch, group {name}: {cache.describe()}" for name, cache in used.items())


def close_buffers() -> None:
    """Lets go of them all; layers that were built with them cannot dispatch any more."""
    while _buffers:
        _buffers.popitem()[1].close()


def default_capacity(vllm_config: VllmConfig, group: GroupName, config: AscendMoEConfig) -> int:
    """C from vLLM's scheduler limits, the same on every rank.

    Where batched_all_to_all or mc2 is configured, the most tokens any step may have. Where they are choices of "auto",
    the most a step of decoding alone may have: that is what it is for, and C rows a rank cost memory and bytes.
    Sequence parallelism spreads a step over the TP ranks. Bounded passes need no more than their bound.
    """
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    tokens = scheduler.max_num_batched_tokens
    if config.comm == "auto":
        per_request = 1 + (0 if speculative is None else speculative.num_speculative_tokens or 0)
        tokens = min(tokens, scheduler.max_num_seqs * per_request)
    if group == "ep":
        tokens = -(-tokens // vllm_config.parallel_config.tensor_parallel_size)
    return tokens if config.max_tokens_in_flight is None else min(tokens, config.max_tokens_in_flight)


def make_situation(
    moe: FusedMoEConfig, vllm_config: VllmConfig, group: GroupName, config: AscendMoEConfig
) -> Situation:
    """What the choice of a strategy depends on, besides token counts.

    Raises:
        UnsupportedError: a strategy that moves tokens to experts, where every rank has a part of every expert.
        ConfigError: HCCL_BUFFSIZE is not a number.
    """
    comm, use_ep = config.comm, moe.moe_parallel_config.use_ep
    if not use_ep:
        if comm not in ("auto", "padded_allgather", "uneven_allgather"):
            raise UnsupportedError(
                f'comm = "{comm}" needs expert parallelism: without it every rank has a slice of every expert, so that '
                'it needs every token. Serve with --enable-expert-parallel, or with comm = "padded_allgather".'
            )
        comm = "padded_allgather" if comm == "auto" else comm
    rows_only = config.experts == "vllm"
    link = _link(vllm_config.device_config.device_type)
    return Situation(
        shape=MoEShape(
            hidden_size=moe.hidden_dim,
            num_experts=moe.num_experts,
            top_k=moe.experts_per_token,
            element_bytes=moe.in_dtype.itemsize,
            payload=config.quantize_dispatch,
            # The groups "dp" and "pcp" have one rank of each TP group: its experts, and tokens that all TP ranks have.
            splits=vllm_config.parallel_config.tensor_parallel_size if use_ep and group != "ep" else 1,
        ),
        link=link,
        comm=comm,
        capacity=None if rows_only else config.max_tokens_across_dp or default_capacity(vllm_config, group, config),
        over_capacity=config.over_capacity,
        formats=(ActivationFormat.ROWS,) if rows_only else tuple(ActivationFormat),
        packed_bytes=DEFAULT_PACKED_BYTES if config.packed_bytes is None else config.packed_bytes,
        exact=config.exact,
        hccl_buffer_mib=buffer_mib_given() if link.name in PRODUCTS else DEFAULT_BUFFER_MIB,
    )


def _link(device_type: str) -> Link:
    npu: Any = getattr(torch, "npu", None)
    return link_of(device_type, npu.get_device_name() if device_type == "npu" else "")


def possible_strategies(situation: Situation, ranks: int) -> tuple[Strategy, ...]:
    """Those that :func:`select` may choose in some forward of a group of so many ranks.

    Raises:
        InvalidValueError, UnsupportedError: a strategy is configured that cannot be used, whatever the tokens; as
            ``select`` says it.
    """
    least = (1,) * ranks
    if situation.comm == "auto":
        return tuple(name for name in STRATEGIES if obstacle_to(name, least, situation) is None)
    select(least, situation)
    if situation.comm in ("batched_all_to_all", "mc2") and situation.over_capacity == "rows":
        return situation.comm, "all_to_all"
    return (situation.comm,)


def must_agree(config: AscendMoEConfig, situation: Situation, placement: ExpertPlacement | None) -> dict[str, object]:
    """By name, whatever decides which collectives a rank enters, and with how many bytes."""
    values = {
        **config.model_dump(exclude={"experts", "bind_cpus"}),
        "max_tokens_across_dp": situation.capacity,
        "packed_bytes": situation.packed_bytes,
    }
    host = {"HCCL_BUFFSIZE": situation.hccl_buffer_mib, "link": situation.link.name}
    named: dict[str, object] = {f"additional_config.{SECTION}.{key}": value for key, value in values.items()}
    placed = repr(None if placement is None else (placement.ranks, placement.slots))
    return {
        **named,
        **host,
        "digest of the expert placement": hashlib.sha256(placed.encode()).hexdigest()[:12],
    }


def describe(situation: Situation, ranks: int) -> str:
    """What was agreed on, and what buffers it means on one rank, for the log."""
    text = f"Token communication: comm = {situation.comm}"
    if "batched_all_to_all" not in possible_strategies(situation, ranks) or situation.capacity is None:
        return text
    cost = price((situation.capacity,) * ranks, situation)["batched_all_to_all"]
    return (
        f"{text}, capacity = {situation.capacity} tokens a rank; batched_all_to_all needs about "
        f"{cost.memory_bytes / 2**20:.1f} MiB of buffers a rank, which all layers share"
    )


def make_comm(
    strategy: Strategy,
    group: Group,
    placement: ExpertPlacement | None,
    situation: Situation,
    config: AscendMoEConfig,
    buffers: BufferCache,
) -> TokenComm:
    """One strategy, with the payload the configuration asks for.

    Args:
        placement: in the group; None for padded_allgather and uneven_allgather, which need none.
        buffers: of batched_all_to_all.
    """
    comm: TokenComm
    if strategy == "padded_allgather":
        comm = PaddedAllGather(group, situation.packed_bytes, exact=config.exact)
    elif strategy == "uneven_allgather":
        comm = UnevenAllGather(group, situation.packed_bytes, exact=config.exact)
    elif strategy == "mc2":
        return _make_mc2(group, placement, situation, config)
    elif strategy == "all_to_all":
        assert placement is not None
        comm = AllToAll(group, placement, exact=config.exact)
    else:
        assert placement is not None
        assert situation.capacity is not None
        comm = BatchedAllToAll(group, placement, situation.capacity, buffers=buffers, exact=config.exact)
    if config.quantize_dispatch == "none":
        return comm
    # Batched experts take scales; those of rows get tokens of the type they were given in.
    return QuantizedDispatch(comm, config.quantize_dispatch, dequantize=comm.format is ActivationFormat.ROWS)


def _make_mc2(
    group: Group, placement: ExpertPlacement | None, situation: Situation, config: AscendMoEConfig
) -> TokenComm:
    """The fused strategy, over a communicator of its own. Configured, and an error above its limits, it must take every
    step there may be; else the largest steps go another way."""
    assert placement is not None
    sizes = mc2_sizes(1, group.world_size, situation)
    tokens = most_tokens(sizes, PRODUCTS[situation.link.name], situation.hccl_buffer_mib)
    if situation.comm == "mc2" and situation.over_capacity == "error" and situation.capacity is not None:
        tokens = situation.capacity
    quantize = config.quantize_dispatch == "int8"
    return MC2(
        own_group(group),
        placement,
        max_tokens=tokens,
        hidden_size=sizes.hidden_size,
        top_k=sizes.top_k,
        quantize=quantize,
        dequantize=quantize,
        product=situation.link.name,
    )
