"""The padded layout of one forward under vllm-ascend, which has made its rows equal on every EP rank already.

With sequence parallelism ("flash comm v1") and data parallelism, vllm-ascend pads the tokens of each DP rank to
``padded_length``, the largest count rounded up to a multiple of TP, and deals them to its TP ranks in chunks of M =
padded_length / TP rows. Gathered over EP that is the padded layout; nothing needs to be cut out or put back.

Imported only after vllm-ascend's operators are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from vllm.distributed import get_dp_group, get_ep_group, get_pcp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm_ascend.ascend_forward_context import _EXTRA_CTX
from vllm_ascend.utils import enable_sp_by_pass

from vllm_ascend_moe.errors import LayoutError
from vllm_ascend_moe.integration.vllm_ascend_counts import tokens_across_dp
from vllm_ascend_moe.layout import TokenLayout

# Key in vLLM's ForwardContext.additional_kwargs.
PADDED_FORWARD_KEY = "ascend_moe_padded_forward"
# Masks of R*M bytes each; a server that decodes sees the same few layouts again and again.
_CACHED_MASKS = 32


@dataclass(frozen=True)
class PaddedForward:
    """Rows of this forward: ``layout`` counts the tokens of each EP rank, ``padded_length`` is TP * M."""

    layout: TokenLayout
    padded_length: int
    dp_metadata: Any

    def check_local(self, x: torch.Tensor) -> None:
        """Refuses a tensor that is not this rank's M rows, before the collective.

        Raises:
            LayoutError: another number of rows.
        """
        _check(x, self.layout.max_local_size, "max_local_size", self.layout)

    def check_gathered(self, x: torch.Tensor) -> None:
        """Refuses a tensor that is not all ranks' R*M rows.

        Raises:
            LayoutError: another number of rows.
        """
        _check(x, self.layout.padded_tokens, "ep_size * max_local_size", self.layout)

    @property
    def keeps_pad_out(self) -> bool:
        """Whether pad rows are kept out of experts and outputs: where there are any, and no graph is captured.

        A captured graph is replayed with other counts, so that it must not contain these.
        """
        return not self.layout.is_uniform and not _EXTRA_CTX.capturing

    def pad_rows(self, device: torch.device) -> torch.Tensor:
        """bool [R*M, 1], True where the gathered row is pad."""
        return _pad_rows(self.layout, device)


def _check(x: torch.Tensor, rows: int, name: str, layout: TokenLayout) -> None:
    if x.shape[0] != rows:
        raise LayoutError(
            "x.shape[0]",
            x.shape[0],
            f"{name} = {rows} (token counts {layout.local_sizes})",
            "Report it, with the model and its parallel configuration; ASCEND_MOE_VLLM_ASCEND=0 runs without us.",
        )


@lru_cache(maxsize=_CACHED_MASKS)
def _pad_rows(layout: TokenLayout, device: torch.device) -> torch.Tensor:
    mask = ~layout.valid_rows()[:, None]
    # From pinned memory the host does not wait for the copy.
    return mask if device.type == "cpu" else mask.pin_memory().to(device, non_blocking=True)


def is_padded() -> bool:
    """Whether vllm-ascend gathers over EP with padding in this forward. Reads no tensor, so also while one traces."""
    return (
        is_forward_context_available()
        and get_forward_context().dp_metadata is not None
        and bool(_EXTRA_CTX.flash_comm_v1_enabled)
        and not enable_sp_by_pass()
    )


def padded_forward() -> PaddedForward | None:
    """This forward's layout, made at its first MoE layer; None where the form is not padded."""
    if not is_padded():
        return None
    context = get_forward_context()
    metadata: Any = context.dp_metadata
    padded_length = _EXTRA_CTX.padded_length
    made = context.additional_kwargs.get(PADDED_FORWARD_KEY)
    # A draft model may run in the same context with other counts.
    if made is None or made.dp_metadata is not metadata or made.padded_length != padded_length:
        made = PaddedForward(true_layout(metadata.num_tokens_across_dp_cpu, padded_length), padded_length, metadata)
        context.additional_kwargs[PADDED_FORWARD_KEY] = made
    return made


def true_layout(reported: torch.Tensor, padded_length: int) -> TokenLayout:
    """The layout of the true counts where they are known (see ``vllm_ascend_counts``), else of those reported."""
    tp_size = get_ep_group().world_size // (get_dp_group().world_size * get_pcp_group().world_size)
    return make_layout(tokens_across_dp(reported, padded_length, max(tp_size, 1)), padded_length)


def make_layout(counts: list[int], padded_length: int) -> TokenLayout:
    """Tokens by EP rank, in DP, PCP, TP order; every PCP rank of a DP rank holds that DP rank's count.

    Args:
        counts: tokens of each DP rank.
        padded_length: rows each DP rank is padded to, a multiple of TP.

    Raises:
        LayoutError: the groups' sizes and the counts contradict each other.
    """
    ep, dp_size, pcp_size = get_ep_group(), get_dp_group().world_size, get_pcp_group().world_size
    tp_size, rest = divmod(ep.world_size, dp_size * pcp_size)
    if rest or len(counts) != dp_size or padded_length % max(tp_size, 1) or max(counts) > padded_length:
        raise LayoutError(
            "num_tokens_across_dp",
            counts,
            f"{dp_size} counts of at most padded_length = {padded_length}, for ep_size = {ep.world_size} = "
            f"DP {dp_size} * PCP {pcp_size} * TP",
            "Report it; ASCEND_MOE_VLLM_ASCEND=0 runs vllm-ascend without us.",
        )
    rows = padded_length // tp_size
    sizes = [min(max(n - tp * rows, 0), rows) for n in counts for _ in range(pcp_size) for tp in range(tp_size)]
    return TokenLayout.of(sizes, ep.rank_in_group)
