"""What one layer launches and where its host time goes, seen by the torch profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_LAYERS = 10


def profile_layer(method: Any, device: torch.device) -> dict[str, Any]:
    """Operators called, device kernels, fresh allocations and megabytes (gathered and reduced hidden) of one layer.

    ``host_table`` holds, for each operator and runtime call, calls and own host microseconds a layer. The profiler
    itself adds about a microsecond to each call.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    before = _device_allocations(device)
    method.layer()
    allocations = _device_allocations(device) - before
    with profile(activities=activities) as trace:
        for _ in range(_LAYERS):
            method.layer()
        if device.type != "cpu":
            torch.accelerator.synchronize()
    events = trace.key_averages()
    host = [e for e in events if e.device_type == DeviceType.CPU and "Synchronize" not in e.key]
    operators = {e.key: e.count / _LAYERS for e in host if "::" in e.key}
    kernels = {e.key: e.count / _LAYERS for e in events if e.device_type == DeviceType.CUDA and "::" not in e.key}
    if device.type == "cpu":
        allocations = operators.get("aten::empty", 0) + operators.get("aten::empty_strided", 0)
    layout = getattr(method, "layout", None) or method.traffic.layout
    row_bytes = method.expert_output.shape[1] * method.expert_output.element_size()
    host.sort(key=lambda e: -e.self_cpu_time_total)
    return {
        "ops": round(sum(operators.values())),
        "kernels": round(sum(kernels.values())),
        "allocs": round(allocations),
        "MB": round(2 * layout.padded_tokens * row_bytes / 1e6, 3),
        "host_table": [(e.key, e.count / _LAYERS, round(e.self_cpu_time_total / _LAYERS, 2)) for e in host[:14]],
        "kernel_table": [
            (e.key[:90], e.count / _LAYERS, round(e.self_device_time_total / _LAYERS, 2))
            for e in events
            if e.device_type == DeviceType.CUDA
        ],
    }


def _device_allocations(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])
