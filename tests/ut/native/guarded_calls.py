"""Runs native experts on tensors that end where a page begins that nobody may touch. A fault ends the process."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from expert_cases import KIND_IDS, KINDS, make_weights

from vllm_ascend_moe.experts.base import ExpertWeights
from vllm_ascend_moe.experts.native import NativeExperts, pack_weights

LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy that ends at such a page."""
    end = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, end + mmap.PAGESIZE)
    copy = torch.frombuffer(room, dtype=x.dtype, count=x.numel(), offset=end - x.nbytes).view(x.shape)
    copy.copy_(x)
    past = ctypes.addressof(ctypes.c_char.from_buffer(room, end))
    if LIBC.mprotect(ctypes.c_void_p(past), mmap.PAGESIZE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return copy


def compare(dtype: torch.dtype, isa: str, hidden_size: int, inner: int, activation: str, packed: bool) -> None:
    """The same bits as on ordinary tensors. Two experts, so that something comes next, and rows of all kinds."""
    weights = make_weights(2, hidden_size, inner, dtype, activation)
    biases = torch.randn(weights.w13.shape[:2]), torch.randn(weights.w2.shape[:2])
    plain = ExpertWeights(w13=weights.w13, w2=weights.w2, w13_bias=biases[0], w2_bias=biases[1])
    safe = ExpertWeights(
        w13=guarded(plain.w13), w2=guarded(plain.w2), w13_bias=guarded(biases[0]), w2_bias=guarded(biases[1])
    )
    if packed:
        plain, safe = pack_weights(plain), pack_weights(safe)
    hidden, topk_weights, ids = torch.randn(51, hidden_size).to(dtype), torch.rand(51, 1), torch.zeros(51, 1).int()
    ids[40:] = 1  # blocks of one and of several, of more than one tile and of less
    out = guarded(torch.zeros_like(hidden))
    NativeExperts(isa).apply(guarded(hidden), guarded(topk_weights), guarded(ids), safe, activation=activation, out=out)
    want = NativeExperts(isa).apply(hidden, topk_weights, ids, plain, activation=activation)
    if not torch.equal(out, want):
        raise AssertionError("other bits")


def main() -> None:
    for name, (dtype, isa) in zip(KIND_IDS, KINDS, strict=True):
        for activation in ("silu", "silu_no_mul", "swigluoai"):
            for hidden_size, inner, packed in ((48, 80, True), (64, 32, True), (48, 80, False), (33, 5, False)):
                sys.stdout.write(f"{name} {activation} {hidden_size} {inner} {packed}\n")
                sys.stdout.flush()
                compare(dtype, isa, hidden_size, inner, activation, packed)
    sys.stdout.write(f"{len(KINDS)} kinds\n")


if __name__ == "__main__":
    main()
