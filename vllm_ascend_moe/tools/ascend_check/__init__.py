"""Checks without an NPU that the Triton kernels lower for Ascend, fit its buffers, and still compute what they should.

    specs      which kernels, with which types and tile sizes (the A2 rows of the tile table): gemm_specs, row_specs,
               sent_row_specs; spec: what a kernel's entry holds
    lower      triton-ascend's front end and BiSheng IR's pipeline, run in the environment that has them
    buffers    planned UB, L1 and L0C use, read from the optimised module
    native     the linalg form of a kernel compiled for this CPU
    numerics   that compiled form against torch, and against copies made wrong on purpose (trial: one call; row_trials,
               slot_trials)
    report     docs/ascend_kernels.md

``make ascend-check`` runs all of it. What it cannot show: the device object, a launch, speed.
"""
