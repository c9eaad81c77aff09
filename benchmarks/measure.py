"""What the benchmarks share: interleaved timing, the description of the machine, tables and JSON."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

Work = Callable[[int], Any]


def environment() -> dict[str, str]:
    """Hardware and versions that figures depend on."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    found = {
        "processor": processor,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def interleaved(works: Mapping[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call of each work, taking turns, so that a busy moment of the machine hits all alike.

    Args:
        works: by name; called with the repetition's number, so that they can rotate over inputs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work(0)
    for repeat in range(repeats):
        for name, work in works.items():
            start = time.perf_counter()
            work(repeat)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, minimum and 90th percentile, scaled."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered) * scale,
        "min": ordered[0] * scale,
        "p90": ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))] * scale,
    }


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A GitHub table of these columns."""
    return tabulate([[row.get(name, "") for name in columns] for row in rows], headers=columns, tablefmt="github")


def write_json(path: Path, command: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"command": command, "environment": environment(), **more, "rows": list(rows)}, indent=1)
    )
