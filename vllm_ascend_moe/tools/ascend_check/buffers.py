"""Planned buffer use of an optimised HIVM module, and the overflow a compiler reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Cube cores of a 910B2: the grid that the GEMM is compiled for.
CUBE_CORES = 24
# Bytes of one core's buffers on Ascend 910B, by the address space's name in HIVM.
LIMITS = {"ub": 196_608, "cbuf": 524_288, "cc": 131_072}
NAMES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
_BITS = {"f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16, "i8": 8, "i64": 64, "f64": 64, "i1": 1}
_CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d+) : i64")
_BUFFER = re.compile(r"pointer_cast\(([^)]*)\).*? : memref<([0-9x]*?)x?(bf16|f16|f32|f64|i1|i8|i16|i32|i64), ")
_SPACE = re.compile(r"#hivm\.address_space<(\w+)>")
_OVERFLOW = re.compile(r"(ub|cbuf|cc|l1|l0c) overflow, requires (\d+) bits while (\d+) bits available")


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

    >>> planned_bytes('''
    ... %c64_i64 = arith.constant 64 : i64
    ... %0 = hivm.hir.pointer_cast(%c64_i64) : memref<4x8xf32, #hivm.address_space<ub>>''')
    {'ub': 192, 'cbuf': 0, 'cc': 0}
    """
    constants = {name: int(value) for name, value in _CONSTANT.findall(module)}
    used = dict.fromkeys(LIMITS, 0)
    for line in module.splitlines():
        found, space = _BUFFER.search(line), _SPACE.search(line)
        if not found or not space or space.group(1) not in used:
            continue
        bits = _BITS[found.group(3)]
        for dimension in filter(None, found.group(2).split("x")):
            bits *= int(dimension)
        size = -(-bits // 8)
        for operand in found.group(1).split(","):
            offset = constants.get(operand.strip(), 0)
            used[space.group(1)] = max(used[space.group(1)], offset + size)
    return used


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
