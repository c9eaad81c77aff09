"""Lowers kernels with triton-ascend and BiSheng IR. Runs in the environment that has them (no torch, no NPU, no CANN).

    python -m vllm_ascend_moe.tools.ascend_check.lower OUT_DIR

writes OUT_DIR/lowered.json and, for the kernels that are run on the CPU, OUT_DIR/NAME.linalg.mlir.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_ascend_moe.tools.ascend_check.buffers import UnreadablePlanError, overflow_in, plan_fault, planned_bytes

TARGETS = ("Ascend910B2", "Ascend910_9391")


@dataclass
class Lowered:
    """What became of one kernel for one target."""

    name: str
    target: str
    tile: str
    expected: str  # "lowers", or the buffer that must be reported as overflowing
    outcome: str = ""  # the same words, or what else happened
    double_buffered: bool = True
    cores: str = ""  # cube, vector, or both
    used: dict[str, int] = field(default_factory=dict)
    detail: str = ""

    @property
    def as_expected(self) -> bool:
        return self.outcome == self.expected


def linalg_of(spec: Any, target: str) -> str:
    """The kernel's linalg form, by triton-ascend's front end."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    gpu = GPUTarget("npu", target, 0)
    backend = make_backend(gpu)
    options = backend.parse_options({})
    source = ASTSource(fn=spec.kernel, signature=spec.signature(), constants=spec.constants)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    metadata = {"hash": "0", "target": gpu, **options.__dict__}
    return stages["ttadapter"](stages["ttir"](module, metadata), metadata)


def optimise(linalg: str, target: str, *, double_buffer: bool) -> subprocess.CompletedProcess[str]:
    """BiSheng IR's pipeline down to the module that would go to CANN: buffers planned, synchronisation placed."""
    import ascendnpuir

    tool = Path(ascendnpuir.__path__[0]) / "bin" / "bishengir-opt"
    buffers = " enable-auto-multi-buffer=true" if double_buffer else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.mlir"
        # triton-ascend strips this attribute before it hands the module on.
        source.write_text(re.sub(r', mix_mode = "[^"]*"', "", linalg))
        triton = "enable-triton-kernel-compile=true"
        command = [
            str(tool),
            str(source),
            f"--hacc-append-device-spec=target={target}",
            f"--lower-hfusion-pipeline={triton}",
            f"--convert-to-hivm-pipeline={triton}",
            f"--optimize-hivm-pipeline={triton}{buffers}",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def lower(spec: Any, linalg: str, target: str) -> Lowered:
    """Optimises one kernel; where double buffering does not fit, once more without, as triton-ascend does."""
    result = Lowered(spec.name, target, spec.tile, spec.overflows or "lowers")
    run = optimise(linalg, target, double_buffer=True)
    if run.returncode and overflow_in(run.stderr):
        result.double_buffered = False
        run = optimise(linalg, target, double_buffer=False)
    overflow = overflow_in(run.stderr)
    if run.returncode == 0:
        read_plan(result, run.stdout)
    elif overflow is not None:
        result.outcome, result.detail = overflow.buffer, str(overflow)
    else:
        result.outcome, result.detail = "failed", run.stderr[-500:]
    return result


def read_plan(result: Lowered, module: str) -> None:
    """Fills in what an optimised module takes. One that cannot be read, or cannot be right, has failed."""
    result.cores = cores_of(module)
    try:
        result.used = planned_bytes(module)
        result.detail = plan_fault(result.used, result.cores)
    except UnreadablePlanError as error:
        result.detail = str(error)
    result.outcome = "failed" if result.detail else "lowers"


def cores_of(module: str) -> str:
    """Which cores an optimised module runs on."""
    if "_mix_aic(" in module:
        return "cube and vector"
    return "cube" if "address_space<cc>" in module else "vector"


def run(out: Path) -> list[Lowered]:
    """Lowers everything, writes the results under ``out``."""
    from vllm_ascend_moe.tools.ascend_check.specs import all_specs, numeric_specs

    out.mkdir(parents=True, exist_ok=True)
    for spec in numeric_specs():
        (out / f"{spec.name}.linalg.mlir").write_text(linalg_of(spec, TARGETS[0]))
    jobs = [(spec, linalg_of(spec, target), target) for target in TARGETS for spec in all_specs()]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: lower(*job), jobs))
    report = {
        "versions": {name: version(name) for name in ("triton-ascend", "ascendnpu-ir")},
        "results": [asdict(result) for result in results],
    }
    (out / "lowered.json").write_text(json.dumps(report, indent=1))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Lower every kernel for Ascend A2 and A3")
    parser.add_argument("out", type=Path)
    wrong = [result for result in run(parser.parse_args().out) if not result.as_expected]
    for result in wrong:
        print(f"{result.target} {result.name}: {result.outcome}, expected {result.expected}. {result.detail}")
    raise SystemExit(1 if wrong else 0)
