"""``python -m vllm_ascend_moe.tools.ascend_check``: the whole check; see the package docstring."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_ascend_moe.tools.ascend_check.native import missing_tools
from vllm_ascend_moe.tools.ascend_check.numerics import TRIALS, Compared, compare
from vllm_ascend_moe.tools.ascend_check.report import render

_ROOT = Path(__file__).resolve().parents[3]


def lower_in(python: Path, out: Path) -> bool:
    """Runs lower.py with another environment's Python; whether everything lowered as expected."""
    command = [str(python), "-m", "vllm_ascend_moe.tools.ascend_check.lower", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(command, env=environment, cwd=_ROOT, check=False).returncode == 0


def compare_all(out: Path) -> list[Compared]:
    """Runs every lowered kernel of numerics.TRIALS on this CPU."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda name: compare(name, (out / f"{name}.linalg.mlir").read_text(), out), TRIALS))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ascend_check", description="Check the Triton kernels for Ascend, on a CPU")
    parser.add_argument("--python", type=Path, required=True, help="of the environment with triton-ascend")
    parser.add_argument("--out", type=Path, default=Path(".cache/ascend"), help="where to leave intermediate files")
    parser.add_argument("--report", type=Path, help="write the report there")
    args = parser.parse_args(argv)
    if missing := missing_tools():
        print(f"ascend_check: {', '.join(missing)} not found. On Debian: apt-get install mlir-19-tools llvm-19 gcc")
        return 1
    # One of an earlier run would pass for this run's.
    (args.out / "lowered.json").unlink(missing_ok=True)
    lowers = lower_in(args.python, args.out)
    if not (args.out / "lowered.json").exists():
        print("ascend_check: lowering stopped before it had a result; its message is above")
        return 1
    lowered = json.loads((args.out / "lowered.json").read_text())
    compared = compare_all(args.out)
    wrong = [row for row in compared if not row.good]
    for row in wrong:
        print(f"{row.name}: error {row.error:.1e} of {row.tolerance:.1e}, {row.caught} of {row.planted} faults noticed")
    good = lowers and not wrong
    if args.report and good:  # which says that everything is as it must be
        args.report.write_text(render(lowered, compared))
    total = len(lowered["results"])
    print(
        f"ascend_check: {total} lowerings {'as expected' if lowers else 'NOT all as expected'}, "
        f"{len(compared) - len(wrong)} of {len(compared)} kernels match torch and notice every fault"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
