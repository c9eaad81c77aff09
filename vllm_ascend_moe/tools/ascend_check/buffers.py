"""Planned buffer use of an optimised HIVM module, and the overflow a compiler reports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

# Cube cores of a 910B2: the grid that the GEMM is compiled for.
CUBE_CORES = 24
# Bytes of one core's buffers on Ascend 910B, by the address space's name in HIVM.
LIMITS = {"ub": 196_608, "cbuf": 524_288, "cc": 131_072}
NAMES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
_BITS = {"f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16, "i8": 8, "i64": 64, "f64": 64, "i1": 1}
_CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d+) : i64")
_BUFFER = re.compile(r"pointer_cast\(([^)]+)\) : memref<((?:\d+x)*)([a-z]+\d+), #hivm\.address_space<(\w+)>>$")
_OVERFLOW = re.compile(r"(ub|cbuf|cc|l1|l0c) overflow, requires (\d+) bits while (\d+) bits available")


class UnreadablePlanError(RuntimeError):
    """A module with a buffer that is not understood here."""


@dataclass(frozen=True)
class Overflow:
    """A tile that does not fit: bytes needed and there are, of one buffer."""

    buffer: str
    needed: int
    limit: int

    def __str__(self) -> str:
        return f"{self.buffer} overflow: needs {self.needed:,} of {self.limit:,} bytes"


def planned_bytes(module: str) -> dict[str, int]:
    """The highest planned address of each buffer of LIMITS, in bytes (0: not used).

    Raises:
        UnreadablePlanError: a buffer whose size or place cannot be read: it could be anything.

    >>> planned_bytes('''
    ... %c64_i64 = arith.constant 64 : i64
    ... %0 = hivm.hir.pointer_cast(%c64_i64) : memref<4x8xf32, #hivm.address_space<ub>>''')
    {'ub': 192, 'cbuf': 0, 'cc': 0}
    """
    constants: dict[str, int] = {}  # names are a function's own, and used below their definition
    used = dict.fromkeys(LIMITS, 0)
    for line in module.splitlines():
        constants.update((name, int(value)) for name, value in _CONSTANT.findall(line))
        if "pointer_cast" in line:
            space, end = _planned(line, constants)
            used[space] = max(used[space], end)
    return used


def _planned(line: str, constants: dict[str, int]) -> tuple[str, int]:
    """The buffer that a line plans, and where that ends."""
    found = _BUFFER.search(line)
    if found is None:
        raise UnreadablePlanError(f"a buffer of a form, type or size that is not known: {line.strip()}")
    operands, dimensions, element, space = found.groups()
    if space not in LIMITS or element not in _BITS:
        raise UnreadablePlanError(f"a buffer of an unknown memory or type: {line.strip()}")
    size = -(-prod(map(int, dimensions.split("x")[:-1])) * _BITS[element] // 8)
    starts = [constants.get(operand.strip()) for operand in operands.split(",")]
    if None in starts:
        raise UnreadablePlanError(f"a buffer at an address that is no constant: {line.strip()}")
    return space, max(start for start in starts if start is not None) + size


def plan_fault(used: dict[str, int], cores: str) -> str:
    """What cannot be in a plan for ``cores`` ("cube", "vector" or "cube and vector"), in words; "" where it can be.

    >>> plan_fault({"ub": 64, "cbuf": 0, "cc": 0}, "vector")
    ''
    >>> plan_fault({"ub": 200_000, "cbuf": 0, "cc": 0}, "vector")
    'UB: 200,000 of 196,608 bytes are planned'
    >>> plan_fault({"ub": 64, "cbuf": 0, "cc": 0}, "cube and vector")
    'L1: none is planned, which a kernel for cube and vector cores cannot do without'
    """
    for space, limit in LIMITS.items():
        if used[space] > limit:
            return f"{NAMES[space]}: {used[space]:,} of {limit:,} bytes are planned"
        core = "vector" if space == "ub" else "cube"
        if used[space] == 0 and core in cores:
            return f"{NAMES[space]}: none is planned, which a kernel for {cores} cores cannot do without"
    return ""


def overflow_in(message: str) -> Overflow | None:
    """The overflow a compiler message reports, if it does.

    >>> str(overflow_in("error: cc overflow, requires 2097152 bits while 1048576 bits available! (possible ...)"))
    'L0C overflow: needs 262,144 of 131,072 bytes'
    """
    found = _OVERFLOW.search(message)
    if found is None:
        return None
    space = {"l1": "cbuf", "l0c": "cc"}.get(found.group(1), found.group(1))
    return Overflow(NAMES[space], int(found.group(2)) // 8, int(found.group(3)) // 8)
