"""The parts of the Ascend check that need no compiler: reading plans, planting faults, writing the report."""

from __future__ import annotations

import doctest

import pytest

from vllm_ascend_moe.tools.ascend_check import buffers
from vllm_ascend_moe.tools.ascend_check.native import portable
from vllm_ascend_moe.tools.ascend_check.numerics import TRIALS, Compared, wrong_copies
from vllm_ascend_moe.tools.ascend_check.report import render

MODULE = """
    %c32768_i64 = arith.constant 32768 : i64
    %c0_i64 = arith.constant 0 : i64
    %c0_i64_7 = arith.constant 65536 : i64
    %0 = hivm.hir.pointer_cast(%c32768_i64) : memref<4x8x16x16xbf16, #hivm.address_space<cbuf>>
    %1 = hivm.hir.pointer_cast(%c0_i64, %c0_i64_7) : memref<64x128xf32, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%c0_i64) : memref<8x8x16x16xf32, #hivm.address_space<cc>>
    %3 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
"""


def test_planned_bytes_is_the_highest_end_of_each_buffer():
    assert buffers.planned_bytes(MODULE) == {"cbuf": 32768 + 8192 * 2, "ub": 65536 + 64 * 128 * 4, "cc": 65536}
    bits = "%0 = hivm.hir.pointer_cast(%c0_i64) : memref<16x256xi1, #hivm.address_space<ub>>"
    assert buffers.planned_bytes(bits)["ub"] == 512, "eight truth values are a byte"
    assert buffers.planned_bytes("") == {"ub": 0, "cbuf": 0, "cc": 0}


def test_an_overflow_names_the_buffer_and_both_sizes():
    found = buffers.overflow_in("x\nerror: ub overflow, requires 1574400 bits while 1572864 bits available! (why)")
    assert (found.buffer, found.needed, found.limit) == ("UB", 196_800, 196_608)
    assert buffers.overflow_in("error: something else") is None


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(buffers).failed == 0


def test_a_wrong_copy_differs_in_one_operation():
    text = "a = arith.addf x\nb = arith.addf y\nc = arith.mulf z\nd = arith.cmpi eq, p\n"
    copies = wrong_copies(text)
    assert len(copies) == 3
    for copy in copies:
        changed = [pair for pair in zip(text.splitlines(), copy.splitlines(), strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1


def test_a_kernel_without_arithmetic_still_gets_a_wrong_copy():
    assert wrong_copies("a = arith.divsi x") == ["a = arith.remsi x"]
    assert wrong_copies("a = arith.maxsi x") == ["a = arith.minsi x"]
    assert wrong_copies("nothing") == []


def test_portable_removes_what_only_ascend_knows():
    text = (
        "module {\n  func.func private @triton_cumsum_0(tensor<16xi32>, i32, i1) -> tensor<16xi32>\n"
        "  func.func @k(%a: memref<?xi8> {tt.kind = 0 : i32}) attributes {x = 1} {\n    scf.if %c {\n    } {hivm.y}\n"
    )
    result = portable(text)
    assert "attributes" not in result
    assert "hivm" not in result
    assert "tt.kind" not in result
    assert "arith.addi" in result  # the running sum has a body now


@pytest.mark.parametrize(
    ("error", "planted", "caught", "good"),
    [(0.0, 2, 2, True), (0.5, 2, 2, False), (0.0, 2, 1, False), (0.0, 0, 0, False)],
)
def test_a_comparison_is_good_only_if_it_matches_and_notices_every_fault(error, planted, caught, good):
    assert Compared("k", error, 0.1, planted, caught).good is good


def test_the_report_shows_use_limits_and_refusals():
    row = {
        "name": "gemm",
        "target": "T",
        "tile": "1x2x3",
        "outcome": "lowers",
        "double_buffered": False,
        "cores": "cube",
    }
    bad = {"name": "big", "target": "T", "tile": "9x9x9", "outcome": "UB", "detail": "UB overflow: needs 2 of 1 bytes"}
    lowered = {"versions": {"tool": "1.0"}, "results": [{**row, "used": {"ub": 1, "cbuf": 2000, "cc": 3}}, bad]}
    text = render(lowered, [Compared("gemm", 0.25, 0.5, 3, 3)])
    assert "| gemm | 1x2x3 | cube | 1 | 2,000 | 3 | no |" in text
    assert "| big | 9x9x9 | UB overflow: needs 2 of 1 bytes |" in text
    assert "| gemm | 2.5e-01 | 5.0e-01 | 3 of 3 |" in text


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_fails_on_a_kernel_that_does_nothing(name):
    """Results start as markers, so that a comparison with torch cannot pass by itself."""
    results = TRIALS[name]().results()
    actual, wanted, tolerance = results[0]
    assert (actual.double() - wanted.double()).norm() > tolerance * wanted.double().norm()
