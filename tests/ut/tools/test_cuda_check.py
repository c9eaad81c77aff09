"""The parts of the CUDA check that need no compiler: what a kernel takes of a multiprocessor, and the report."""

from __future__ import annotations

import doctest

import pytest

from vllm_ascend_moe.tools.cuda_check import resources
from vllm_ascend_moe.tools.cuda_check.resources import PROCESSORS, Kernel, Resources, limits_passed, usage_in

HOPPER = PROCESSORS[90]


def kernel(**changes):
    return Kernel("k", Resources(**{"registers": 128, "spilled": 0, "shared": 100_000, "warps": 4} | changes))


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(resources).failed == 0


@pytest.mark.parametrize(
    ("registers", "warps", "programs"),
    [(128, 4, 4), (129, 4, 3), (168, 4, 3), (169, 4, 2), (255, 8, 1), (32, 4, 16), (16, 4, 16), (24, 1, 32)],
)
def test_registers_limit_the_programs(registers, warps, programs):
    """The numbers of NVIDIA's occupancy calculator: 65,536 registers, given to warps by 256; 64 warps; 32 programs."""
    assert Resources(registers=registers, spilled=0, shared=0, warps=warps).resident(HOPPER) == programs


@pytest.mark.parametrize(("shared", "programs"), [(232_448, 1), (232_449, 0), (115_712, 2), (115_713, 1), (76_800, 3)])
def test_shared_memory_limits_the_programs(shared, programs):
    """1 KiB of the 228 KiB goes to the system for every program."""
    assert kernel(shared=shared).resources.resident(HOPPER) == programs


def test_good_kernels_pass_no_limit():
    assert limits_passed([kernel(), kernel(shared=0), kernel(spilled=128)], 2, HOPPER) == {}


@pytest.mark.parametrize(
    ("kernels", "programs", "kind", "words"),
    [
        ([kernel(), kernel(shared=232_449)], 1, "shared memory", "232,449 of 232,448"),
        ([kernel(), kernel(spilled=132)], 2, "spills", "132 bytes"),
        ([kernel(registers=200)], 3, "programs", "holds 2 of it at a time, the table counts on 3"),
        ([], 1, "nothing", "launched nothing"),
    ],
)
def test_each_limit_is_named_with_its_numbers(kernels, programs, kind, words):
    found = limits_passed(kernels, programs, HOPPER)
    assert list(found) == [kind]
    assert words in found[kind]


@pytest.mark.parametrize("text", ["", "REG:1 STACK:0 SHARED:0 LOCAL:0\nREG:1 STACK:0 SHARED:0 LOCAL:0"])
def test_another_answer_of_cuobjdump_is_an_error(text):
    with pytest.raises(RuntimeError, match="one is expected"):
        usage_in(text)
