"""vLLM's CPU communicator with the uneven collectives it lacks, on gloo, in the padded layout.

They make vLLM's own expert-parallel code run on a CPU too: quantised and monolithic MoE methods gather and reduce with
``all_gatherv`` and ``reduce_scatterv``, which stock vLLM only has on accelerators.
"""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from vllm_ascend_moe.errors import ShapeError
from vllm_ascend_moe.layout import TokenLayout
from vllm_ascend_moe.ops.native import TorchGroup, padded_all_gather, padded_reduce_scatter

# gloo refuses these types; a gather only moves bytes, so it moves them as integers of the same width.
_BYTE_VIEWS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.uint32: torch.int32,
    torch.uint16: torch.int16,
}


class AscendMoECpuCommunicator(CpuCommunicator):
    """Adds all_gatherv, reduce_scatterv and reduce_scatter."""

    def _layout(self, sizes: list[int] | None, rows: int) -> TokenLayout:
        sizes = [rows] * self.world_size if sizes is None else sizes
        if len(sizes) != self.world_size:
            raise ShapeError(
                "len(sizes)",
                len(sizes),
                f"world_size = {self.world_size} sizes",
                "Pass one size per rank of the group.",
            )
        return TokenLayout.of(sizes, self.rank_in_group)

    def _group(self) -> TorchGroup:
        assert self.device_group is not None, "vLLM gives every CPU communicator its gloo group"
        return TorchGroup(self.device_group)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenates every rank's rows, which may differ in number.

        Args:
            input_: one tensor or a list, each with ``sizes[rank]`` entries along ``dim``.
            dim: the dimension that is concatenated.
            sizes: entries per rank, the same list on every rank; None: all as many as here.

        Raises:
            ShapeError: sizes for another number of ranks, or a tensor that does not have its size.
        """
        if isinstance(input_, list):
            return [self._all_gatherv_one(x, dim, sizes) for x in input_]
        return self._all_gatherv_one(input_, dim, sizes)

    def _all_gatherv_one(self, x: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
        rows = x.movedim(dim, 0)
        layout = self._layout(sizes, rows.shape[0])
        if rows.shape[0] != layout.local_size:
            raise ShapeError(
                f"input.shape[{dim}]",
                rows.shape[0],
                f"sizes[{layout.rank}] = {layout.local_size}",
                "Pass the sizes of this step.",
            )
        raw = _BYTE_VIEWS.get(x.dtype, x.dtype)
        gathered = padded_all_gather(rows.contiguous().view(raw), layout.max_local_size, self._group())
        if not layout.is_uniform:
            # The callers of this method expect no pad rows between the ranks' tokens.
            gathered = torch.cat([gathered[r.start : r.stop] for r in map(layout.rows_of, range(layout.ep_size))])
        return gathered.view(x.dtype).movedim(0, dim).contiguous()

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sums over ranks and returns this rank's entries along ``dim``; ranks may have different numbers of them.

        Args:
            input_: ``sum(sizes)`` entries along ``dim``, ordered by rank.
            dim: the dimension that is scattered.
            sizes: entries per rank, the same list on every rank; None: equal shares.

        Raises:
            ShapeError: sizes that do not add up to the input.
        """
        rows = input_.movedim(dim, 0)
        layout = self._layout(sizes, rows.shape[0] // self.world_size)
        if rows.shape[0] != layout.num_tokens:
            raise ShapeError(
                f"input.shape[{dim}]",
                rows.shape[0],
                f"sum(sizes) = {layout.num_tokens}",
                "Pass the sizes of this step; without sizes the input must divide by the number of ranks.",
            )
        padded = rows
        if not layout.is_uniform:
            padded = rows.new_zeros((layout.padded_tokens, *rows.shape[1:]))
            for target, source in zip(
                map(layout.rows_of, range(layout.ep_size)), rows.split(layout.local_sizes), strict=True
            ):
                padded[target.start : target.stop] = source
        reduced = padded_reduce_scatter(padded, layout.max_local_size, layout.local_size, self._group())
        return reduced.movedim(0, dim).contiguous()

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Equal shares; see :meth:`reduce_scatterv`."""
        if torch.compiler.is_compiling():
            # Models call this one from code that is traced. Dynamo knows PyTorch's collectives, but not native ones.
            return super().reduce_scatter(input_, dim)
        return self.reduce_scatterv(input_, dim)
