"""N processes with a gloo (or NCCL) group: rank-prefixed output, the group always destroyed, no hang.

The body must be importable by name (a module-level function), since processes are spawned, never forked.
"""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vllm_ascend_moe.errors import AscendMoEError, UnsupportedError

DEFAULT_TIMEOUT_S = 120.0
_HOST = "127.0.0.1"

# Before ranks meet for the first time each imports what its body needs: half a minute where that is vLLM and the
# machine is busy, and not the same time on every rank. A run's own timeout begins after that.
START_TIMEOUT_S = 240.0

# After the first failure the other ranks most often wait in a collective for the failed one. They get this long to
# report a fault of their own, which is the interesting one where the first was only an echo, and are then ended.
GRACE_S = 2.0


class RankFailedError(AscendMoEError, RuntimeError):
    """A rank raised, died or took too long.

    The message holds the tracebacks; ``kinds`` by rank the exception's type name, "ProcessDied" or "Timeout".
    """

    def __init__(self, message: str, kinds: dict[int, str]) -> None:
        super().__init__(message)
        self.kinds = kinds


def free_port() -> int:
    """A TCP port that was free a moment ago on the loopback interface. Another process may take it meanwhile."""
    with socket.socket() as s:
        s.bind((_HOST, 0))
        return int(s.getsockname()[1])


class _PrefixedStream:
    """Puts ``[rank r]`` before every line, so that the output of many processes can be read.

    Lines are passed on whole: ranks share one pipe, and pieces of their lines would mix in it.
    """

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream, self._prefix, self._begun = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        """Also ends a line that was begun: whoever flushes wants to see it now."""
        if self._begun:
            self.write("\n")
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    timeout_s: float,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    results: Queue[tuple[int, str | None, Any]],
) -> None:
    prefix = f"[rank {rank}] "
    sys.stdout, sys.stderr = _PrefixedStream(sys.stdout, prefix), _PrefixedStream(sys.stderr, prefix)
    torch.set_num_threads(1)
    if backend == "nccl":
        _take_gpu(rank, world_size)
    try:
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore(_HOST, port, is_master=False, timeout=datetime.timedelta(seconds=START_TIMEOUT_S))
        _meet(store, _STARTED, rank, world_size)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        # A body that ends at once takes its connections away; nobody may be still making them.
        _meet(store, "connected", rank, world_size)
        # As bytes: the queue would send tensors as shared memory, which is gone if this process ends before they are
        # read; and a result that cannot be pickled is so a fault of this rank, not of the queue's thread.
        results.put((rank, None, pickle.dumps(body(rank, world_size, *args))))
    except Exception as error:  # noqa: BLE001  every fault of the body is carried to the parent, which raises it
        results.put((rank, type(error).__name__, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_STARTED = "started"


def _meet(store: dist.Store, where: str, rank: int, world_size: int) -> None:
    """Returns when every rank is here; raises DistStoreError after the store's timeout."""
    store.set(f"{where}/{rank}", "")
    store.wait([f"{where}/{other}" for other in range(world_size)])


def _take_gpu(rank: int, world_size: int) -> None:
    """The rank's GPU becomes the current one: of its own, or shared in turn where there are fewer GPUs than ranks.

    NCCL refuses two ranks on one GPU of one host. Each sharing rank therefore says that it is a host of its own, and
    NCCL connects them through its network transport, here over the loopback interface: the same collectives, kernels
    and graph capture on the way, but not the speed of NVLink.
    """
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    if world_size > gpus:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def launch(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Runs ``body(rank, world_size, *args)`` in ``world_size`` processes of one group.

    Args:
        world_size: number of processes.
        body: module-level function; its result must be picklable.
        backend: "gloo", or "nccl": one GPU a process, or GPUs shared in turn where there are fewer.
        timeout_s: for each collective, and twice this for the whole run from when all processes have started.

    Returns:
        Results by rank.

    Raises:
        RankFailedError: a rank raised, died, or the run took too long. UnsupportedError: NCCL without a GPU.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise UnsupportedError('backend = "nccl" needs a CUDA GPU, and there is none here. Use backend = "gloo".')
    context = mp.get_context("spawn")
    results: Queue[tuple[int, str | None, Any]] = context.Queue()
    # The store lives here: its port cannot be taken by another launch meanwhile, and no rank's end takes it away.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = [
        context.Process(
            target=_rank_main, args=(rank, world_size, store.port, backend, timeout_s, body, args, results), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        _await_start(world_size, store, processes, results)
        values = _collect(world_size, results, processes, 2 * timeout_s)
        for process in processes:
            process.join(timeout=30)  # what it has printed is lost where it is killed
        return values
    finally:
        # Ranks that are alive here wait for one that failed.
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()


def _await_start(world_size: int, store: dist.Store, processes: list[Any], results: Any) -> None:
    """Returns when all ranks have started, or one has ended or has something to report."""
    keys = [f"{_STARTED}/{rank}" for rank in range(world_size)]
    deadline = time.monotonic() + START_TIMEOUT_S
    while not store.check(keys) and results.empty() and all(process.exitcode is None for process in processes):
        if time.monotonic() > deadline:
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            kinds = dict.fromkeys(silent, "Timeout")
            raise RankFailedError(f"--- ranks {silent}: not started after {START_TIMEOUT_S:.0f} s", kinds)
        time.sleep(0.05)


def _collect(world_size: int, results: Any, processes: list[Any], timeout_s: float) -> list[Any]:
    """Results by rank; after a failure, waits no longer than GRACE_S for the rest and raises."""
    values: dict[int, Any] = {}
    failures: dict[int, tuple[str, str]] = {}
    deadline = time.monotonic() + timeout_s
    while len(values) + len(failures) < world_size:
        known = len(failures)
        # Exit codes are read before the queue: what a rank put there before it ended is then found below.
        exited = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode is not None}
        try:
            rank, kind, value = results.get(timeout=0.2)
        except Empty:
            for rank, code in exited.items():
                if rank not in values and rank not in failures:
                    failures[rank] = ("ProcessDied", f"the process ended with exit code {code} and without a result")
        else:
            if kind is None:
                values[rank] = pickle.loads(value)
            else:
                failures[rank] = (kind, value)
        if failures and not known:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            break
    silent = sorted(set(range(world_size)) - set(values) - set(failures))
    if not failures and not silent:
        return [values[rank] for rank in range(world_size)]
    lines = [f"--- rank {rank}: {kind}\n{trace}" for rank, (kind, trace) in sorted(failures.items())]
    if silent:
        why = "since another rank failed" if failures else f"took longer than {timeout_s:.0f} s"
        lines.append(f"--- ranks {silent}: no result, ended ({why})")
    kinds = {rank: kind for rank, (kind, _) in failures.items()}
    raise RankFailedError("\n".join(lines), kinds | ({} if failures else dict.fromkeys(silent, "Timeout")))
