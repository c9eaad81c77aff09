"""What the choice of a strategy depends on besides token counts, and what stands against a strategy.

Symbols: T_r tokens of rank r; R ranks; M max(T_r); C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_ascend_moe.comm.all_gather import DEFAULT_PACKED_BYTES
from vllm_ascend_moe.comm.base import ActivationFormat
from vllm_ascend_moe.comm.cost_model import STRATEGIES, MoEShape, Strategy
from vllm_ascend_moe.comm.links import LINKS, Link
from vllm_ascend_moe.comm.mc2_limits import DEFAULT_BUFFER_MIB, PRODUCTS, Sizes, fault_of
from vllm_ascend_moe.errors import ConfigError, DtypeError, InvalidValueError

FORMATS: dict[Strategy, ActivationFormat] = {
    "padded_allgather": ActivationFormat.ROWS,
    "all_to_all": ActivationFormat.ROWS,
    "batched_all_to_all": ActivationFormat.BATCHED,
    "mc2": ActivationFormat.ROWS,
    "uneven_allgather": ActivationFormat.ROWS,
}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What does not change from forward to forward, the same on every rank.

    Args:
        shape: sizes of the MoE layer.
        link: between ranks.
        comm: "auto", or the strategy the configuration asks for.
        capacity: C of batched_all_to_all, tokens a rank; None: it was not agreed on.
        over_capacity: when batched_all_to_all or mc2 is configured and a rank has more tokens than it takes: "error" or
            "rows" (all_to_all).
        fixed_shapes: the forward is captured or its shapes must not depend on other ranks' token counts.
        formats: for which experts exist.
        packed_bytes: of PaddedAllGather and UnevenAllGather.
        exact: partial sums in fp32 in the order of ranks.
        hccl_buffer_mib: HCCL_BUFFSIZE, on which mc2 depends.
    """

    shape: MoEShape
    link: Link = LINKS["gloo"]
    comm: Strategy | Literal["auto"] = "auto"
    capacity: int | None = None
    over_capacity: Literal["error", "rows"] = "error"
    fixed_shapes: bool = False
    formats: tuple[ActivationFormat, ...] = tuple(ActivationFormat)
    packed_bytes: int = DEFAULT_PACKED_BYTES
    exact: bool = False
    hccl_buffer_mib: int = DEFAULT_BUFFER_MIB

    def __post_init__(self) -> None:
        if self.comm != "auto" and self.comm not in STRATEGIES:
            raise ConfigError("comm", self.comm, f"auto or one of {', '.join(STRATEGIES)}", "Choose one of them.")
        if self.capacity is not None and self.capacity < 1:
            raise InvalidValueError("capacity", self.capacity, "1 or more, or None", "Pass the most tokens of a rank.")


def obstacle_to(name: Strategy, sizes: tuple[int, ...], situation: Situation) -> str | None:
    """Why a strategy cannot be used at all in a forward with these token counts, or None."""
    most, capacity, link = max(sizes), situation.capacity, situation.link
    if FORMATS[name] not in situation.formats:
        return f"there are no experts of the {FORMATS[name].value} format"
    if name == "batched_all_to_all":
        if capacity is None:
            return "no capacity was agreed on"
        return f"{most} tokens on a rank, capacity {capacity}" if most > capacity else None
    if name == "mc2" and (fault := mc2_fault(most, len(sizes), situation)) is not None:
        return f"{fault.field} = {fault.value!r}, but it must be {fault.limit}"
    if name == "uneven_allgather":
        if link.uneven == "none" and situation.comm == "auto":
            return f"{link.name} has no collectives of uneven sizes: copies would travel"
        if len(sizes) > link.uneven_ranks:
            return (
                f"collectives of uneven sizes take at most {link.uneven_ranks} ranks on {link.name}, not {len(sizes)}"
            )
    if not situation.fixed_shapes:
        return None
    if name == "all_to_all":
        return "its shapes follow the routing, and shapes must be fixed"
    return None if min(sizes) == most else "its shapes follow uneven token counts, and shapes must be fixed"


def mc2_sizes(max_tokens: int, ranks: int, situation: Situation) -> Sizes:
    """What the limits of mc2 are of, for steps of so many tokens a rank."""
    shape = situation.shape
    return Sizes(
        ranks=ranks,
        num_experts=shape.num_experts,
        splits=shape.splits,
        max_tokens=max_tokens,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
    )


def mc2_fault(most: int, ranks: int, situation: Situation) -> InvalidValueError | None:
    """Why mc2 cannot be used with ``most`` tokens on the fullest rank, as the error to raise, or None."""
    shape, link = situation.shape, situation.link
    if link.name not in PRODUCTS:
        where = f"another strategy between devices of type {link.device}: mc2 is two operators of torch_npu, over HCCL"
        return ConfigError("comm", "mc2", where, 'Choose "auto", or run on Atlas A2 or A3.')
    if situation.exact:
        return ConfigError(
            "exact", True, "false with mc2, which sums in an order of its own", "Choose another strategy."
        )
    if shape.payload == "fp8":
        return ConfigError("quantize_dispatch", "fp8", "none or int8 with mc2", "Choose one of them.")
    if shape.element_bytes != 2:
        return DtypeError("bytes of an element", shape.element_bytes, "2 (bf16 or fp16) with mc2", "Cast the model.")
    return fault_of(mc2_sizes(max(1, most), ranks, situation), PRODUCTS[link.name], situation.hccl_buffer_mib)
