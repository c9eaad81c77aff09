"""What a compiled kernel takes of a multiprocessor, and how many of its programs one holds."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# Bytes a thread may spill: a few values that wait from one pass of the GEMM to the next. A product loop that spills
# has hundreds.
SPILL_LIMIT = 128
_SYSTEM_SHARED = 1024  # bytes of shared memory that the system takes of every program


@dataclass(frozen=True)
class Processor:
    """The limits of one multiprocessor, from the CUDA programming guide's table of compute capabilities."""

    program_shared: int  # bytes that one program may take
    shared: int  # bytes for all programs
    registers: int = 65_536
    warps: int = 64
    programs: int = 32


PROCESSORS = {
    80: Processor(166_912, 167_936),
    90: Processor(232_448, 233_472),
    100: Processor(232_448, 233_472),
}


@dataclass(frozen=True)
class Resources:
    """Of one program; registers are those of a thread, spilled bytes of local memory too."""

    registers: int
    spilled: int
    shared: int
    warps: int

    def resident(self, processor: Processor) -> int:
        """How many programs a multiprocessor holds at a time; 0 where one does not fit.

        >>> Resources(registers=168, spilled=0, shared=99_000, warps=4).resident(PROCESSORS[90])
        2
        >>> Resources(registers=255, spilled=0, shared=0, warps=8).resident(PROCESSORS[90])
        1
        >>> Resources(registers=32, spilled=0, shared=240_000, warps=4).resident(PROCESSORS[90])
        0
        """
        if self.shared > processor.program_shared:
            return 0
        # Registers are given out to warps, 256 at a time, and warps to four schedulers.
        each = -(-self.registers * 32 // 256) * 256
        warps = min(processor.warps, processor.registers // 4 // each * 4)
        return min(processor.programs, warps // self.warps, processor.shared // (self.shared + _SYSTEM_SHARED))


@dataclass(frozen=True)
class Kernel:
    """One kernel that a case launched."""

    name: str
    resources: Resources


def limits_passed(kernels: Sequence[Kernel], programs: int, processor: Processor) -> dict[str, str]:
    """What is wrong with the kernels of a case: kind of limit -> the numbers.

    Args:
        programs: how many a multiprocessor has to hold at a time.
    """
    found = {} if kernels else {"nothing": "launched nothing"}
    for kernel in kernels:
        used, resident = kernel.resources, kernel.resources.resident(processor)
        if used.shared > processor.program_shared:
            found["shared memory"] = f"needs {used.shared:,} of {processor.program_shared:,} bytes of shared memory"
        elif resident < programs:
            found["programs"] = f"a multiprocessor holds {resident} of it at a time, the table counts on {programs}"
        if used.spilled > SPILL_LIMIT:
            found["spills"] = (
                f"{used.spilled:,} bytes of a thread's registers spill to memory, {SPILL_LIMIT} are let pass"
            )
    return found


def resources_of(kernel: Any) -> Resources:
    """Of one of Triton's compiled kernels.

    Raises:
        RuntimeError: cuobjdump says something unknown.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = usage_in(text)
    return Resources(registers, stack + local, kernel.metadata.shared, kernel.metadata.num_warps)


def usage_in(text: str) -> tuple[int, int, int]:
    """Registers of a thread, bytes of stack and of local memory.

    >>> usage_in(" Function f:\\n  REG:210 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:1416 TEXTURE:0")
    (210, 16, 8)
    """
    found = _USAGE.findall(text)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump names {len(found)} kernels, one is expected: {text[-300:]}")
    registers, stack, local = map(int, found[0])
    return registers, stack, local
