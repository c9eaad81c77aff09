"""What prepare and finalize of one MoE layer submit, with vllm-ascend's functions and with ours, by number of DP ranks.

Run by test_counts.py on the soft NPU; prints a JSON line a case. One process: collectives are stand-ins, counted and
left out of the launches; everything else is the code of vllm-ascend on real NPU tensors. Engines are counted by
test_engines.py; this shows how counts grow.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TP, HIDDEN, EXPERTS, TOP_K = 2, 64, 16, 3


class CountedGroup:
    """An EP group of ``world_size`` ranks whose collectives allocate their output and launch nothing."""

    rank_in_group = 0

    def __init__(self, world_size: int) -> None:
        self.world_size, self.calls = world_size, 0

    def _output(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        self.calls += 1
        return torch.empty_strided((rows, *x.shape[1:]), x.stride(), dtype=x.dtype, device="npu")

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._output(x, x.shape[0] * self.world_size)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._output(x, x.shape[0] // self.world_size)


class OperatorCalls(TorchDispatchMode):
    """Counts every operator that Python calls, also views and those on CPU tensors: what the host does."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def context(counts: list[int], padded_length: int) -> SimpleNamespace:
    return SimpleNamespace(
        dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(counts, dtype=torch.int32)),
        additional_kwargs={},
        flash_comm_v1_enabled=True,
        padded_length=padded_length,
        capturing=False,
        is_draft_model=False,
    )


def main() -> None:
    import vllm_ascend.ops.register_custom_ops as theirs
    from softnpu_engines_counts import _read, step

    import vllm_ascend_moe.integration.vllm_ascend_forward as forward
    import vllm_ascend_moe.integration.vllm_ascend_padded as ours

    def layer(form: str, counts: list[int]) -> dict[str, Any]:
        padded_length = -(-max(counts) // TP) * TP
        group = CountedGroup(len(counts) * TP)
        here = context(counts, padded_length)
        for module in (theirs, ours, forward):
            module.get_ep_group = lambda: group
        for module in (theirs, forward):
            module.get_forward_context = lambda: here
            module.get_dp_group = lambda: SimpleNamespace(world_size=len(counts))
            module.enable_sp_by_pass = lambda: False
        forward.get_pcp_group = lambda: SimpleNamespace(world_size=1)
        forward.is_forward_context_available = lambda: True
        extra = type(forward._EXTRA_CTX)
        extra._ctx = staticmethod(lambda: here)
        gather, reduce = (ours._gather, ours._reduce) if form == "theirs" else (ours.gather, ours.reduce)
        x = torch.zeros(padded_length // TP, HIDDEN, dtype=torch.bfloat16, device="npu")
        logits = torch.zeros(padded_length // TP, EXPERTS, dtype=torch.bfloat16, device="npu")
        ids = torch.zeros(len(counts) * padded_length, TOP_K, dtype=torch.int32, device="npu")

        def once() -> None:
            hidden = gather(x, True, True)
            gather(logits, True, True)
            made = forward.padded_forward()
            if form == "ours" and made.keeps_pad_out:
                ids.masked_fill_(made.pad_rows(ids.device), -1)
            reduce(hidden, True)

        start = _read()
        once()  # the layout and the mask are made once per forward
        first = step(start, _read())
        group.calls, before = 0, _read()
        once()
        counted = {**step(before, _read()), "collectives": group.calls}
        with OperatorCalls() as operators:
            once()
        return {**counted, "operators": operators.number, "first": first}

    for dp in (2, 4, 8, 16):
        for name, counts in (("uneven", [1 + (7 * i) % 11 for i in range(dp)]), ("even", [8] * dp)):
            for form in ("theirs", "ours"):
                row = {"dp": dp, "counts": name, "form": form, **layer(form, counts)}
                sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
