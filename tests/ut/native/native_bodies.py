"""What the processes of the native tests run, and groups that hide their process group from native code."""

from __future__ import annotations

import random
from math import prod

import torch
import torch.distributed as dist

from vllm_ascend_moe.ops import native

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.uint32,
]
PADDED_WITH_MINUS_ONE = (torch.int32, torch.int64, torch.float32, torch.bfloat16)


class PlainGroup:
    """The same ranks through vLLM's group interface alone, so that the plain torch form runs. Inputs are contiguous."""

    def __init__(self, group: native.TorchGroup) -> None:
        self._group = group
        self.world_size, self.rank_in_group = group.world_size, group.rank_in_group

    def all_gather(self, input_, dim=0):
        assert input_.is_contiguous()
        return self._group.all_gather(input_, dim)

    def reduce_scatter(self, input_, dim=0):
        assert input_.is_contiguous()
        return self._group.reduce_scatter(input_, dim)


def random_bytes(shape, dtype, device="cpu"):
    """Any bits at all, so NaN and infinities too; bool holds 0 or 1."""
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).view(shape).to(device)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Shape, dtype, strides and every bit."""
    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    bits = [x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for x in (a, b)]
    assert torch.equal(*bits)


def random_inputs(rnd: random.Random, rows: int, device="cpu"):
    """Three tensors of these rows, 1-D to 3-D, the first sometimes strided, and their pad values."""
    tensors, pads = [], []
    whole = rnd.random() < 0.4  # rows of 16 bytes and multiples, which devices pack in one kernel
    for _ in range(3):
        dtype = rnd.choice(DTYPES)
        inner = [rnd.choice([16, 32])] if whole else [rnd.choice([1, 2, 5, 8]) for _ in range(rnd.randrange(3))]
        start = rnd.choice([0, 0, 3])  # values into a buffer, so also at odd addresses
        flat = random_bytes((start + rows * prod(inner),), dtype, device)
        tensors.append(flat[start:].view(rows, *inner))
        pads.append(rnd.choice([0, -1]) if dtype in PADDED_WITH_MINUS_ONE else 0)
    if not whole and rnd.random() < 0.4:
        dtype = tensors[0].dtype
        tensors[0] = random_bytes((rows, 6, 2), dtype, device).transpose(1, 2)[:, :, ::2]
    elif not whole and rnd.random() < 0.4:
        tensors[0] = random_bytes((rows, 3), tensors[0].dtype, device)[:, 1:2]  # contiguous, yet of row stride 3
    return tensors, pads


def compare_forms(rank: int, ranks: int, seed: int, rounds: int, device_type: str) -> int:
    """Native and plain form on random inputs: same shapes, dtypes, strides and bits. Returns the cases compared."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    group = native.TorchGroup(dist.group.WORLD)
    plain = PlainGroup(group)
    assert native.native_group_name(group) is not None
    assert native.native_group_name(plain) is None
    rnd = random.Random(seed)  # the same on every rank: sizes, shapes and dtypes must agree
    torch.manual_seed(1000 * seed + rank)
    cases = 0
    for _ in range(rounds):
        sizes = [rnd.choice([0, 0, 1, 3, 7]) for _ in range(ranks)]
        longest, mine = max(sizes) + rnd.choice([0, 0, 2]), sizes[rank]
        xs, pads = random_inputs(rnd, mine, device)
        for x, value in zip(xs, pads, strict=True):
            assert_same(
                native.padded_all_gather(x, longest, group, value), native.padded_all_gather(x, longest, plain, value)
            )
        for gather in (native.packed_all_gather, native.coalesced_all_gather):
            for a, b in zip(gather(xs, pads, longest, group), gather(xs, pads, longest, plain), strict=True):
                assert_same(a, b)
        y = torch.randint(-9, 10, (3, ranks * longest), device=device).to(rnd.choice([torch.float32, torch.bfloat16]))
        y = y.t() if rnd.random() < 0.5 else y.t().contiguous()
        assert_same(
            native.padded_reduce_scatter(y, longest, mine, group), native.padded_reduce_scatter(y, longest, mine, plain)
        )
        cases += 1
    return cases


def gather_after_restart(rank: int, ranks: int) -> tuple[float, float, list[str]]:
    """On one rank: gathers, ends the group, starts another under the same name and gathers again."""
    values, names = [], []
    for value in (1.0, 2.0):
        group = native.TorchGroup(dist.group.WORLD)
        names.append(native.native_group_name(group))
        values.append(native.padded_all_gather(torch.full((1, 1), value), 1, group).item())
        if value == 1.0:
            del group
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=ranks)
    return values[0], values[1], names
