"""The two operators of the padded layout, in the ``vllm`` library, with real and fake implementations.

``maybe_all_gather_and_maybe_unpad(Tensor x) -> Tensor``
    x [T_r, ...] -> [R*M, ...] in the padded layout. Pad rows are 0, or -1 in int32 and int64 tensors (expert ids,
    input ids), so that they route nowhere. Without data-parallel metadata: a plain all-gather over EP.
``maybe_pad_and_reduce(Tensor x) -> Tensor``
    x [R*M, ...] -> [T_r, ...], summed over ranks; the pad tail of this rank's shard is dropped here and only here.
    Without data-parallel metadata: a plain reduce-scatter over EP.

Both take the layout from vLLM's forward context: from :class:`ForwardLayouts` where our platform put it there, else
from the DP metadata (sizes that describe the EP group, else one count per DP rank over the DP group). Whether a draft
or a multimodal model runs changes nothing. No output ever aliases an input, also on one rank: functional operators
that return their input are silently wrong under torch.compile.

The module-level names are kept stable: tests of vllm-ascend patch and call them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from vllm.distributed import get_dp_group, get_ep_group, get_pcp_group
from vllm.forward_context import get_forward_context

from vllm_ascend_moe.errors import LayoutError
from vllm_ascend_moe.layout import TokenLayout, expand_local_sizes
from vllm_ascend_moe.ops.forward_layouts import FORWARD_LAYOUTS_KEY
from vllm_ascend_moe.ops.native import Group, padded_all_gather, padded_reduce_scatter

GATHER_OP = "maybe_all_gather_and_maybe_unpad"
REDUCE_OP = "maybe_pad_and_reduce"
_DISPATCH_KEYS = ("CPU", "CUDA", "PrivateUse1")
_ID_DTYPES = (torch.int32, torch.int64)
_libraries: list[torch.library.Library] = []


def _get_ep_local_sizes(dp_metadata: Any, ep_group: Group) -> list[int] | None:
    """One size per EP rank, in DP, PCP, TP order, or None where the metadata does not describe the EP group."""
    if dp_metadata is None:
        return None
    try:
        sizes = dp_metadata.get_chunk_sizes_across_dp_rank()
    except (AssertionError, AttributeError):
        # vLLM asserts outside its sp_local_sizes context: no sizes are set there.
        return None
    if sizes is None:
        return None
    if len(sizes) == ep_group.world_size:
        return [int(size) for size in sizes]
    expanded = expand_local_sizes(
        sizes,
        ep_size=ep_group.world_size,
        dp_size=get_dp_group().world_size,
        pcp_size=get_pcp_group().world_size,
    )
    return None if expanded is None else list(expanded)


def group_and_layout() -> tuple[Group, TokenLayout | None]:
    """The group this forward's layer communicates over, and its layout (None: no token counts, all ranks equal)."""
    context = get_forward_context()
    layouts = (getattr(context, "additional_kwargs", None) or {}).get(FORWARD_LAYOUTS_KEY)
    if layouts is not None and layouts.active is not None:
        group = {"ep": get_ep_group, "dp": get_dp_group, "pcp": get_pcp_group}[layouts.active]()
        return group, layouts.layout()
    dp_metadata, ep_group = context.dp_metadata, get_ep_group()
    if dp_metadata is None:
        return ep_group, None
    sizes = _get_ep_local_sizes(dp_metadata, ep_group)
    if sizes is not None:
        return ep_group, TokenLayout.of(sizes, ep_group.rank_in_group)
    # The sizes do not describe the EP group: the input is one DP rank's, the same on each of its TP ranks.
    dp_group = get_dp_group()
    with unset_fake_temporarily():
        # To read numbers is a tensor operation, which is refused on real tensors while a graph is traced.
        counts = dp_metadata.num_tokens_across_dp_cpu.tolist()
    return dp_group, TokenLayout.of(counts, dp_group.rank_in_group)


def _pad_value(x: torch.Tensor) -> int:
    return -1 if x.dtype in _ID_DTYPES else 0


def _maybe_all_gather_and_maybe_unpad_impl(x: torch.Tensor) -> torch.Tensor:
    """[T_r, ...] -> [R*M, ...]. See the module's docstring.

    Raises:
        LayoutError: ``x`` has more rows than max_local_size.
    """
    group, layout = group_and_layout()
    rows = x.shape[0] if layout is None else layout.max_local_size
    return padded_all_gather(x, rows, group, pad_value=_pad_value(x))


def _maybe_pad_and_reduce_impl(x: torch.Tensor) -> torch.Tensor:
    """[R*M, ...] -> [T_r, ...]. See the module's docstring.

    Raises:
        ShapeError: ``x`` does not have R*M rows.
        LayoutError: without a layout, rows that do not divide by R.
    """
    group, layout = group_and_layout()
    if layout is not None:
        return padded_reduce_scatter(x, layout.max_local_size, layout.local_size, group)
    _check_divisible(x, group)
    rows = x.shape[0] // group.world_size
    return padded_reduce_scatter(x, rows, rows, group)


def _check_divisible(x: torch.Tensor, group: Group) -> None:
    if x.shape[0] % group.world_size:
        raise LayoutError(
            "x.shape[0]",
            x.shape[0],
            f"a multiple of ep_size = {group.world_size}",
            "Pass as many rows per rank, or run inside a forward context with token counts.",
        )


def _rows(x: torch.Tensor, count: int) -> int | torch.SymInt:
    """``count``, or a fresh symbol while a graph is traced.

    The count depends on the tokens of all ranks, which change from step to step without any input of the graph
    changing its shape: a number would be baked into the graph and be wrong at the next step.
    """
    shape_env = getattr(getattr(x, "fake_mode", None), "shape_env", None)
    if shape_env is None:
        return count
    rows = shape_env.create_unbacked_symint()
    torch._check(rows >= 0)
    return rows


def _maybe_all_gather_and_maybe_unpad_fake(x: torch.Tensor) -> torch.Tensor:
    """Shape, dtype and device of the real operator, without data."""
    group, layout = group_and_layout()
    if layout is None:
        return x.new_empty((x.shape[0] * group.world_size, *x.shape[1:]))
    return x.new_empty((group.world_size * _rows(x, layout.max_local_size), *x.shape[1:]))


def _maybe_pad_and_reduce_fake(x: torch.Tensor) -> torch.Tensor:
    """Shape, dtype and device of the real operator, without data."""
    group, layout = group_and_layout()
    if layout is None:
        return x.new_empty((x.shape[0] // group.world_size, *x.shape[1:]))
    return x.new_empty((_rows(x, layout.local_size), *x.shape[1:]))


def register_custom_ops() -> bool:
    """Registers both operators for CPU, CUDA and PrivateUse1 (NPU). Harmless when called again.

    Returns:
        True where this call registered them, False where they were there already (ours or vllm-ascend's).
    """
    if hasattr(torch.ops.vllm, GATHER_OP):
        return False
    library = torch.library.Library("vllm", "FRAGMENT")
    for name, real, fake in (
        (GATHER_OP, _maybe_all_gather_and_maybe_unpad_impl, _maybe_all_gather_and_maybe_unpad_fake),
        (REDUCE_OP, _maybe_pad_and_reduce_impl, _maybe_pad_and_reduce_fake),
    ):
        library.define(f"{name}(Tensor x) -> Tensor")
        for key in _DISPATCH_KEYS:
            library.impl(name, real, dispatch_key=key)
        library._register_fake(name, fake)
    # The registration lives as long as its Library object.
    _libraries.append(library)
    return True
