"""An unmodified vllm-ascend engine on the soft NPU."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from tests.e2e.cpu.conftest import on_ranks
from vllm_ascend_moe.integration.generate import EngineSpec, Generated, Request, generate
from vllm_ascend_moe.softnpu.settings import environment, folders

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = REPOSITORY / ".venv" / "vllm-ascend-site"
SOURCE = REPOSITORY / ".venv" / "vllm-ascend-src"
PLUGIN = Path(__file__).parent / "plugin"


# Prompts of very different lengths, so that ranks have different numbers of tokens in the same step.
_LENGTHS = (5, 33, 1, 17, 64, 3, 120, 2) * 3
# All but two at once; then one alone, the other ranks idle; then one alone on another rank.
_WAVES = [list(range(len(_LENGTHS) - 2)), [len(_LENGTHS) - 2], [len(_LENGTHS) - 1]]


def make_requests() -> list[Request]:
    rng = random.Random(0)
    return [Request([rng.randrange(256) for _ in range(length)], max_tokens=6) for length in _LENGTHS]


def check_ready() -> None:
    """Fails with what to run where a part is missing."""
    for needed in (SITE / "vllm_ascend", SOURCE / "tests" / "ut", folders().lib / "libsoftnpu_dispatch.so"):
        assert needed.exists(), f"{needed} is missing: run `make softnpu-engines`"


def npu_environment(*, ours: bool, sequence_parallel: bool, counts: Path | None = None) -> dict[str, str]:
    """Variables of a process that runs vllm-ascend on the soft NPU."""
    path = os.pathsep.join([str(SITE), str(PLUGIN)])
    env = {
        **environment(folders(), {"PYTHONPATH": path}),
        "ASCEND_MOE_VLLM_ASCEND": "1" if ours else "0",
        "VLLM_ASCEND_ENABLE_FLASHCOMM1": "1" if sequence_parallel else "0",
        # The default of vllm-ascend, expandable segments, needs virtual device memory.
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1200",
        "OMP_NUM_THREADS": "1",
    }
    if counts is not None:
        env["SOFTNPU_ENGINES_COUNTS"] = str(counts)
    return env


def run_vllm_ascend(
    model: str, *, dp: int, tp: int, ours: bool, sequence_parallel: bool, counts: Path | None = None
) -> list[Generated]:
    """Greedy outputs of make_requests, dealt to DP ranks in turn. Expert parallel over all ranks, eager, bf16."""
    spec = EngineSpec(
        model,
        on_ranks(make_requests(), dp),
        dp=dp,
        tp=tp,
        expert_parallel=dp * tp > 1,
        dtype="bfloat16",
        waves=_WAVES,
        env=npu_environment(ours=ours, sequence_parallel=sequence_parallel, counts=counts),
        engine_args={"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 512},
    )
    return generate(spec, timeout_s=1500)


def read_counts(folder: Path) -> list[dict[str, Any]]:
    """What every MoE layer of every rank submitted (plugin/softnpu_engines_counts.py), without the profile run."""
    rows = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [row for row in rows if not row["profile"]]
