"""What there is to know of a kernel before it is lowered. Needs no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with everything that is fixed at compile time.

    Args:
        name: in the report and in file names.
        kernel: the ``triton.jit`` function.
        types: of the arguments that are not int32; constants: constexpr arguments, and None for absent pointers.
        overflows: the buffer that this tile is known not to fit, where the check is that it is refused.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    tile: str
    overflows: str = ""

    def signature(self) -> dict[str, str]:
        """The Triton type of each argument that is not a constant."""
        names = self.kernel.arg_names
        return {name: self.types.get(name, "i32") for name in names if name not in self.constants}
