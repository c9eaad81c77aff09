"""The token layouts of one forward, from vLLM's parallel configuration and DP metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed import get_dp_group, get_pcp_group, get_tp_group
from vllm.forward_context import get_forward_context

from vllm_ascend_moe.errors import LayoutError, UnsupportedError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY, ForwardLayouts, GroupName

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.model_executor.layers.fused_moe import FusedMoEParallelConfig


def communication_group(parallel: FusedMoEParallelConfig, tp_size: int) -> GroupName | None:
    """The group one MoE layer communicates over; None where its input and experts are all on this TP group.

    Raises:
        UnsupportedError: DP with PCP and TP without sequence parallelism (vLLM refuses it too).
    """
    if parallel.is_sequence_parallel:
        return "ep"
    if parallel.dp_size > 1:
        if parallel.use_ep and parallel.pcp_size > 1:
            if tp_size > 1:
                raise UnsupportedError(
                    f"data_parallel_size = {parallel.dp_size} with prefill_context_parallel_size = "
                    f"{parallel.pcp_size} and tensor_parallel_size = {tp_size} needs sequence-parallel MoE, which "
                    "this model does not use. Run it with tensor_parallel_size = 1, or without PCP."
                )
            return "ep"
        return "dp"
    return "pcp" if parallel.use_ep and parallel.pcp_size > 1 else None


def current_layouts() -> ForwardLayouts:
    """The layouts our platform made for this forward.

    Raises:
        LayoutError: there are none: the layer runs outside vLLM's set_forward_context, or without token counts.
    """
    layouts = get_forward_context().additional_kwargs.get(FORWARD_LAYOUTS_KEY)
    if layouts is None:
        raise LayoutError(
            "forward context",
            "no token layouts",
            "one with the token counts of all ranks",
            "Run the layer inside vLLM's set_forward_context with num_tokens.",
        )
    return layouts


def make_forward_layouts(parallel_config: ParallelConfig, dp_metadata: Any, num_tokens: int | None) -> ForwardLayouts:
    """Layouts for every group a layer of this forward may use.

    Args:
        parallel_config: vLLM's.
        dp_metadata: vLLM's DPMetadata, or None without data parallelism.
        num_tokens: tokens of this DP rank, used for PCP without DP.

    Returns:
        The layouts; empty where no group communicates (one DP rank, no PCP).
    """
    pcp_size = parallel_config.prefill_context_parallel_size
    layouts = ForwardLayouts()
    if dp_metadata is None:
        if pcp_size > 1 and num_tokens is not None:
            layouts.by_group["pcp"] = TokenLayout.of([num_tokens] * pcp_size, get_pcp_group().rank_in_group)
        return layouts
    counts = dp_metadata.num_tokens_across_dp_cpu.tolist()
    dp_rank, tp = get_dp_group().rank_in_group, get_tp_group()
    # Without EP the runner has already gathered over PCP when a layer communicates over DP.
    repeat = 1 if parallel_config.enable_expert_parallel else pcp_size
    layouts.by_group["dp"] = TokenLayout.of([count * repeat for count in counts], dp_rank)
    layouts.by_group["ep"] = TokenLayout.from_dp(
        counts,
        dp_rank=dp_rank,
        tp_rank=tp.rank_in_group,
        pcp_rank=get_pcp_group().rank_in_group,
        tp_size=tp.world_size,
        pcp_size=pcp_size,
    )
    return layouts
