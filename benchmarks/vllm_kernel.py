"""vLLM's own batched Triton kernel, loaded from its file without the rest of vLLM, to compare with."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

VLLM_TILES = [(m, n, k) for m in (16, 32, 64, 128) for n in (64, 128) for k in (64, 128)]


def load_vllm_kernel(path: Path) -> Callable[..., None]:
    """``invoke_moe_batched_triton_kernel`` of vLLM's file, its other vLLM imports replaced by empty stand-ins."""

    real = {
        "tl": tl,
        "triton": triton,
        "use_tensor_descriptor": lambda: False,
        "normalize_batched_scales_shape": lambda scale, experts: scale,
    }

    class Stub(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "__path__":
                return []
            if f"{self.__name__}.{name}" in sys.modules:
                return sys.modules[f"{self.__name__}.{name}"]
            if name.startswith("__"):
                raise AttributeError(name)
            return real.get(name) or type(name, (), {})

    source = path.read_text()
    names = {line.split()[1] for line in source.splitlines() if line.startswith(("from vllm", "import vllm"))}
    parents = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
    added = [name for name in sorted(names | parents) if name not in sys.modules]
    sys.modules.update({name: Stub(name) for name in added})
    try:
        spec = importlib.util.spec_from_file_location("vllm_batched_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        for name in added:
            del sys.modules[name]
    return module.invoke_moe_batched_triton_kernel


def vllm_call(
    invoke: Callable[..., None], a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, counts: torch.Tensor, tile: Any
) -> Callable[[], None]:
    config = dict(zip(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"), tile, strict=True))
    return lambda: invoke(
        a, w, out, counts, tl.bfloat16, None, None, None, False, False, False, config, per_act_token_quant=False
    )


def best_vllm_tile(
    invoke: Callable[..., None], a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, counts: torch.Tensor
) -> tuple[int, int, int]:
    """The fastest of VLLM_TILES here; tiles that do not fit the chip are skipped."""
    calls = {tile: vllm_call(invoke, a, w, out, counts, tile) for tile in VLLM_TILES}

    def usable(tile: tuple[int, int, int]) -> bool:
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        try:
            calls[tile]()
        except triton.runtime.errors.OutOfResources:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        tiles = [tile for tile, good in zip(calls, pool.map(usable, calls), strict=True) if good]
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = {}
    for tile in tiles:
        start.record()
        calls[tile]()
        calls[tile]()
        stop.record()
        stop.synchronize()
        times[tile] = start.elapsed_time(stop)
    return min(times, key=times.__getitem__)
