"""A small tensor on its way to the host, so that work can be queued before the host waits for it."""

from __future__ import annotations

from typing import Any

import torch


class HostRead:
    """Starts to copy a tensor to the host.

    On CUDA the copy goes to pinned memory, and :meth:`wait` waits for it alone, not for what was queued after it.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._event: Any = None
        if x.device.type == "cuda":
            stream = torch.cuda.current_stream(x.device)  # the copy's, which need not be the current device's
            x = x.to("cpu", non_blocking=True)  # pinned, from torch's cache of such memory
            self._event = torch.cuda.Event()
            self._event.record(stream)
        self._x = x

    def wait(self) -> list[Any]:
        """The values, nested as ``tolist`` gives them. The host waits here."""
        if self._event is not None:
            self._event.synchronize()
        return self._x.tolist()
