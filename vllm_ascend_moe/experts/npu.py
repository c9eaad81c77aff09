"""Experts of both formats on an Ascend NPU, through torch_npu's own operators; bf16, fp16, fp32 and W8A8.

    npu_moe_init_routing_v2     the rows that have an expert here, sorted by expert, and their counts
    npu_grouped_matmul          w13, each expert on its own rows
    npu_swiglu                  (other activations: plain torch on the NPU)
    npu_grouped_matmul          w2
    npu_moe_token_unpermute     back to the rows, weighted and summed in fp32

Nothing is read back: every shape is known to the host, counts stay on the device, and the number of launches depends
neither on experts nor on ranks, so a layer can be captured in a graph. A choice that is not routed, or lives on
another rank, becomes expert E_l, one past the last: outside of the active range, so that its row is neither copied nor
multiplied, and with a weight of 0, for which the unpermute does not read. The price of not asking how many rows there
are: the buffers between the products have rows * K rows, and activation and requantisation pass over all of them.

Symbols: rows tokens; H hidden size; N expert intermediate size; K top-k; E_l experts on this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.experts.activation import activate
from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.checks import check_batched, check_routing
from vllm_ascend_moe.experts.npu_checks import check_shapes, result_dtype
from vllm_ascend_moe.experts.scaled import ScaledExpertWeights
from vllm_ascend_moe.ops.npu import npu_operator, token_unpermute_operator

# Arguments of the operators that are numbers with a meaning.
_UNQUANTIZED, _COUNTS, _ENDS, _BY_ROWS, _ONE_OUTPUT = -1, 1, 0, 0, 2


class _Operators(NamedTuple):
    """Of torch_npu, looked up when the kernel is made: a compiled layer cannot import."""

    quantize: Any
    route: Any
    product: Any
    swiglu: Any
    unpermute: Any


class NpuExperts:
    """:class:`~vllm_ascend_moe.experts.base.RowsExperts` and ``BatchedExperts`` on an NPU.

    ``weights`` are floating, of the dtype of ``hidden``, or :class:`ScaledExpertWeights` in int8 (W8A8: rows are
    quantised too, each with its own scale, unless they come in int8; products are exact in int32). They are read as
    they lie, [E_l, out, in]; no copy is made. Layers can be compiled as one graph.

    Raises:
        MissingDependencyError: torch_npu is not installed.
    """

    def __init__(self) -> None:
        self._operators = _Operators(
            quantize=npu_operator("npu_dynamic_quant"),
            route=npu_operator("npu_moe_init_routing_v2"),
            product=npu_operator("npu_grouped_matmul"),
            swiglu=npu_operator("npu_swiglu"),
            unpermute=token_unpermute_operator(),
        )

    def apply(
        self,
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
        *,
        expert_map: torch.Tensor | None = None,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`~vllm_ascend_moe.experts.base.RowsExperts`.

        Args:
            scales: fp32 [rows] of int8 ``hidden``, as a strategy hands them on. The result then has the dtype of
                ``out``, or bf16.

        Raises:
            ShapeError, DtypeError: operands that do not fit. InvalidValueError: an unknown activation.
        """
        check_routing(hidden, topk_weights, topk_ids)
        if scales is not None and scales.shape != hidden.shape[:1]:
            wanted = f"[{hidden.shape[0]}], one for each row of hidden"
            raise ShapeError("scales.shape", list(scales.shape), wanted, "Pass one scale for each row.")
        num_local = weights.w13.shape[0]
        slots = _slots(topk_ids, expert_map, num_local)
        nowhere = slots == num_local
        factors = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        factors = factors.to(torch.float32).masked_fill(nowhere, 0)
        y = _routed_mlp(self._operators, hidden, slots, factors, weights, activation, scales, out)
        return y if out is None else out.copy_(y)

    def apply_batched(
        self,
        hidden: torch.Tensor,
        expert_num_tokens: torch.Tensor,
        weights: ExpertWeights,
        *,
        activation: str = "silu",
        scales: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`~vllm_ascend_moe.experts.base.BatchedExperts`. Rows past the count: 0, or what ``out`` held.

        A grouped product wants an expert's rows right after the last expert's, so the real rows are copied there and
        back: the rows format with one choice a row, which the batch's own rows make.

        Raises:
            As :meth:`apply`.
        """
        check_batched(hidden, expert_num_tokens, scales, weights.w13.shape[0])
        num_local, rows, hidden_size = hidden.shape
        experts = torch.arange(num_local, dtype=torch.int32, device=hidden.device)[:, None]
        used = torch.arange(rows, device=hidden.device) < expert_num_tokens[:, None]
        slots = torch.where(used, experts, num_local).view(-1, 1)
        factors = used.to(torch.float32).view(-1, 1)
        row_scales = None if scales is None else scales.reshape(-1)
        rows_of_all = hidden.reshape(-1, hidden_size)
        y = _routed_mlp(self._operators, rows_of_all, slots, factors, weights, activation, row_scales, out)
        y = y.view(hidden.shape)
        return y if out is None else out.copy_(torch.where(used[..., None], y.to(out.dtype), out))


def _slots(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_local: int) -> torch.Tensor:
    """int32 [rows, K]: the local expert of each choice, or E_l where it has none here."""
    if expert_map is None:
        slots = topk_ids.clamp(-1, num_local)
    else:
        # One clamp makes every id that is out of range one of the two at the ends of the table.
        table = torch.nn.functional.pad(expert_map, (1, 1), value=-1)
        index = topk_ids.clamp(-1, expert_map.numel()) + 1
        slots = table.index_select(0, index.flatten()).view(topk_ids.shape)
    # -1 modulo E_l + 1 is E_l.
    return slots.to(torch.int32).remainder(num_local + 1)


def _routed_mlp(
    operators: _Operators,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    factors: torch.Tensor,
    weights: ExpertWeights,
    activation: str,
    scales: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """``y[i] = sum over k of factors[i, k] * mlp of expert slots[i, k] (hidden[i])``: [rows, H], floating."""
    dtype = result_dtype(hidden, weights, scales, out)
    check_shapes(hidden, weights, activation)
    if 0 in (*hidden.shape, slots.shape[1], weights.w13.shape[0], weights.w2.shape[2]):
        # The operators refuse empty tensors, and here nothing is computed.
        return hidden.new_zeros(hidden.shape, dtype=dtype)
    quantized = isinstance(weights, ScaledExpertWeights)
    if quantized and scales is None:
        hidden, scales = operators.quantize(hidden)
    elif not quantized and scales is not None:
        hidden, scales = (hidden.to(torch.float32) * scales[:, None]).to(dtype), None
    num_local = weights.w13.shape[0]
    x, positions, counts, row_scales = operators.route(
        hidden,
        slots,
        scale=scales,
        active_num=slots.numel(),
        expert_num=num_local + 1,
        expert_tokens_num_type=_COUNTS,
        expert_tokens_num_flag=True,
        quant_mode=_UNQUANTIZED,
        active_expert_range=[0, num_local],
    )
    h = _product(operators, x, weights, "w13", counts, row_scales, dtype)
    h = operators.swiglu(h) if activation == "silu" else activate(h, activation)
    middle_scales = None
    if quantized:
        h, middle_scales = operators.quantize(h)
    y = _product(operators, h, weights, "w2", counts, middle_scales, dtype)
    # Positions of choices without an expert are -1; with a factor of 0 they are not read, but must be in range.
    return operators.unpermute(y, positions.clamp_(min=0), factors)


def _product(
    operators: _Operators,
    x: torch.Tensor,
    weights: ExpertWeights,
    which: str,
    counts: torch.Tensor,
    row_scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x @ weight^T + bias`` of each expert's rows, in ``dtype``. Rows past the last expert's hold anything."""
    weight: torch.Tensor = getattr(weights, which)
    bias: torch.Tensor | None = getattr(weights, f"{which}_bias")
    quantized = isinstance(weights, ScaledExpertWeights)
    options: dict[str, Any] = {}
    if quantized:
        # The scale's dtype is prescribed by the result's.
        scale = getattr(weights, f"{which}_scale").to(dtype if dtype == torch.bfloat16 else torch.float32)
        options = {"scale": [scale], "per_token_scale": [row_scales], "output_dtype": dtype}
    elif bias is not None:
        options = {"bias": [bias.to(dtype if dtype == torch.float16 else torch.float32)]}
    (y,) = operators.product(
        [x],
        [weight.transpose(1, 2)],
        group_list=counts,
        # A list of counts may not have length 1; then count and end are the same number.
        group_list_type=_COUNTS if len(counts) > 1 else _ENDS,
        group_type=_BY_ROWS,
        split_item=_ONE_OUTPUT,
        **options,
    )
    if quantized and bias is not None:
        # The operator adds integers before scaling; a floating bias comes after.
        experts = torch.searchsorted(counts.cumsum(0), torch.arange(len(y), device=y.device), right=True)
        y += bias.to(dtype).index_select(0, experts.clamp_(max=len(counts) - 1))
    return y
