"""Triton kernels of the experts: one source for NVIDIA GPUs and Ascend NPUs. Need only torch and triton.

    tiles       the tile table per target; targets: which target a device is
    schedule    which tile a program works on (device code)
    product     one tile's matrix product: tensor descriptors or plain pointers (device code)
    activation  expert activations (device code)
    tile        one output tile: product, scales, bias, activation, store (device code)
    gemm        the expert GEMM over batched or ragged groups (device code)
    operands    what the GEMM accepts, strides; descriptors: tensor descriptors of the operands
    launch      expert_gemm(); tune: which tiles are the fastest for given operands
    rows        the kernels of the three below (device code)
    quantize    activate_rows(): activation of a [gate; up] tensor, per-token quantisation of the result
    combine     combine(): each token's weighted sum of its expert outputs
    permute     plan_permutation(), permute_rows(): rows sorted by expert, and where each one went
    slots       plan_slots(): rows of the batched format (slot_kernels: device code)
    sent_rows   the all-to-all by row: its plan, rows of bytes, ids on arrival, sums (sent_row_kernels: device code)
    cached_launch  launches without the search for the compiled kernel

Nothing here synchronises with the host but tune: token counts stay on the device. Triton launches on the current
device and trusts addresses, so operands on another one are refused (InvalidValueError), and so are operands on several
(ShapeError, which names the one).
"""

from __future__ import annotations

from vllm_ascend_moe.errors import MissingDependencyError

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "vllm_ascend_moe.kernels needs triton (CUDA: pip install triton; Ascend: pip install triton-ascend), which "
        "cannot be imported here. Install it, or use the native or reference experts."
    ) from error
