"""Buffers of fixed shape that all layers of a model share, so that a forward allocates nothing large."""

from __future__ import annotations

from math import prod

import torch

from vllm_ascend_moe.errors import InvalidValueError

_Key = tuple[str, tuple[int, ...], torch.dtype, torch.device]


class BufferCache:
    """One tensor for each (name, shape, dtype, device); the owner decides what a name is for. One object per group.

    What a buffer holds lasts until somebody asks for the same one again: for a strategy that is its next dispatch,
    so that a layer must be done with what was dispatched to it before the next layer dispatches. Work of one device
    is ordered by its stream; where two streams (or threads) use one cache, the caller orders them.

    A CUDA graph keeps addresses, so run a step once before it is captured, and keep the cache as long as the graph.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, torch.Tensor] = {}
        self._closed = False

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """The buffer: contiguous, with whatever its last user left in it (anything at all at first, NaN too).

        Args:
            name: what it is for. Two uses that must not overwrite each other have two names.
            shape, dtype, device: of the tensor; another of them is another buffer.

        Raises:
            InvalidValueError: the cache is closed.
        """
        if self._closed:
            raise InvalidValueError("BufferCache", "closed", "open", "Make a new cache and a new strategy with it.")
        key = (name, shape, dtype, torch.device(device))
        buffer = self._buffers.get(key)
        if buffer is None:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[key] = torch.empty(shape, dtype=dtype, device=device)
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(_bytes(key) for key in self._buffers)

    def describe(self) -> str:
        """One line a buffer, largest first, under a line with the sum.

        >>> cache = BufferCache()
        >>> _ = cache.get("rows", (2, 512), torch.bfloat16), cache.get("sums", (4,), torch.float32)
        >>> print(cache.describe())
        2 buffers, 2,064 bytes
        2,048 bytes: rows [2, 512] bfloat16 on cpu
        16 bytes: sums [4] float32 on cpu
        """
        lines = [f"{len(self._buffers)} buffers, {self.nbytes:,} bytes"]
        for key in sorted(self._buffers, key=lambda key: (-_bytes(key), key[0])):
            name, shape, dtype, device = key
            lines.append(f"{_bytes(key):,} bytes: {name} {list(shape)} {str(dtype).split('.')[1]} on {device}")
        return "\n".join(lines)

    def close(self) -> None:
        """Lets go of every buffer; using the cache afterwards is an error. Closing twice is harmless."""
        self._buffers.clear()
        self._closed = True


def _bytes(key: _Key) -> int:
    return prod(key[1]) * key[2].itemsize
