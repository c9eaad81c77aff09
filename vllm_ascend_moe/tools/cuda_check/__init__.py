"""Compiles the Triton kernels for NVIDIA GPUs to machine code, on a machine without one, and checks what comes out.

    compile_only  launches that compile and do not run, for a GPU that is not there
    cases         which launches: the package's own functions, on operands of the CPU
    resources     registers, spills and shared memory of a kernel, and how many programs a multiprocessor holds
    report        docs/cuda_kernels.md

``make cuda-check`` runs all of it. What it cannot show: results and speed (on a GPU: tests/e2e/cuda, benchmarks/).
"""
