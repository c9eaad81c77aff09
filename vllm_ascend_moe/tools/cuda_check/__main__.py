"""``python -m vllm_ascend_moe.tools.cuda_check``: the whole check; see the package docstring."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from vllm_ascend_moe.kernels.targets import interpreted
from vllm_ascend_moe.tools.cuda_check.cases import cases
from vllm_ascend_moe.tools.cuda_check.check import Checked, check
from vllm_ascend_moe.tools.cuda_check.report import render


def check_all(names: list[str]) -> list[Checked]:
    """Every case, two at a time, each in one of two processes: Triton's driver is replaced there."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(check, names))


def versions() -> str:
    """Of Triton and its assembler."""
    from triton import knobs

    text = subprocess.run([knobs.nvidia.ptxas.path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\S+),", text)
    return f"triton {version('triton')}, ptxas {found.group(1) if found else 'unknown'}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cuda_check", description="Compile the Triton kernels for NVIDIA GPUs")
    parser.add_argument("--report", type=Path, help="write the report there")
    parser.add_argument("--case", action="append", help="only this one; may be given several times")
    args = parser.parse_args(argv)
    if interpreted():
        parser.error("TRITON_INTERPRET is set: kernels would be interpreted, not compiled. Unset it.")
    known = cases()
    if unknown := sorted(set(args.case or ()) - set(known)):
        parser.error(f"no case {unknown[0]!r}; there are: {', '.join(known)}")
    results = check_all(args.case or list(known))
    wrong = [row for row in results if row.faults]
    for row in wrong:
        print(f"{row.name} (compute capability {row.capability / 10}): {'; '.join(row.faults)}")
    if args.report and not wrong:  # which says that everything is as it must be
        args.report.write_text(render(versions(), results))
    kernels = sum(len(row.kernels) for row in results)
    refused = sum(bool(row.refused) and not row.faults for row in results)
    good = len(results) - len(wrong)
    print(f"cuda_check: {good} of {len(results)} cases good, {kernels} kernels compiled, {refused} refused on purpose")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
