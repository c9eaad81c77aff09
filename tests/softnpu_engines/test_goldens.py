"""vllm-ascend's nightly golden tests of single operators, from its source archive, on the soft NPU.

Every file of them is run, or left out with a reason that is checked: one that no longer holds fails. They compare
operators with references by the people who wrote the kernels. What they do not prove: speed, the NPU's own rounding;
and test_gating_top_k_softmax.py drops the answers of its comparisons, so that it proves calls alone.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.softnpu_engines.engine import SOURCE, npu_environment
from vllm_ascend_moe.softnpu.info import inventory, operators
from vllm_ascend_moe.softnpu.settings import folders

pytestmark = pytest.mark.timeout(900)

NIGHTLY = SOURCE / "tests" / "e2e" / "nightly"
OPS = "single_node/ops/singlecard_ops"

# The last line of each run, without the time: a test that vllm-ascend adds or skips is seen.
RUN = {
    f"{OPS}/test_add_rms_norm_bias.py": "126 passed",
    f"{OPS}/test_batch_matmul_transpose.py": "3 passed, 26 subtests passed",
    f"{OPS}/test_dequant_swiglu_quant.py": "5 passed",
    f"{OPS}/test_gating_top_k_softmax.py": "200 passed",
    f"{OPS}/test_moe_init_routing_custom.py": "1 passed",
    f"{OPS}/test_npu_moe_gating_top_k.py": "216 passed",
    f"{OPS}/test_vocabparallelembedding.py": "1 passed",
}


@dataclass(frozen=True)
class NotEmulated:
    """The file is about these operators, or needs them; none is emulated."""

    operators: tuple[str, ...]

    def __init__(self, *operators: str) -> None:
        object.__setattr__(self, "operators", operators)

    def check(self, text: str) -> None:
        for operator in self.operators:
            assert operator.split("::")[1] in text, f"{operator} is not in the file"
            assert operator not in whole(), f"{operator} is emulated: run the file"


@dataclass(frozen=True)
class Needs:
    """The file needs something else that is not here, which it names so."""

    what: str
    name: str

    def check(self, text: str) -> None:
        assert self.name in text, f"{self.name} is not in the file"


class SkippedByItself:
    """vllm-ascend marks all tests of the file to be skipped."""

    def check(self, text: str) -> None:
        assert text.count("\ndef test_") == text.count("@pytest.mark.skip(")


MLA = NotEmulated("_C_ascend::mla_preprocess")
FFN = NotEmulated("_C_ascend::dispatch_ffn_combine")

LEFT_OUT = {
    f"{OPS}/test_bgmv_expand.py": NotEmulated("_C_ascend::bgmv_expand"),
    f"{OPS}/test_bgmv_shrink.py": NotEmulated("_C_ascend::bgmv_shrink"),
    f"{OPS}/test_causal_conv1d_310.py": NotEmulated("_C_ascend::npu_causal_conv1d_310"),
    f"{OPS}/test_compressor_metadata.py": NotEmulated(
        "_C_ascend::compressor_metadata", "_C_ascend::compressor_metadata_out"
    ),
    f"{OPS}/test_copy_and_expand_eagle_inputs.py": NotEmulated("_C_ascend::npu_copy_and_expand_eagle_inputs"),
    f"{OPS}/test_fused_gdn_gating.py": NotEmulated("_C_ascend::npu_fused_gdn_gating"),
    f"{OPS}/test_fused_moe.py": SkippedByItself(),
    f"{OPS}/test_gmm_swiglu_quant_weight_nz_tensor_list.py": Needs(
        "hours: its reference multiplies 8192 x 7168 x 4096 integers without BLAS; the operator is emulated, and "
        "tests/softnpu/test_quant_custom_ops.py has smaller ones",
        "M, K, E, N = 8192, 7168, 4, 4096",
    ),
    f"{OPS}/test_grouped_matmul_swiglu_quant.py": Needs("weights of 4 bits, which are not emulated", "torch.quint4x2"),
    f"{OPS}/test_hamming_dist_top_k.py": NotEmulated("_C_ascend::npu_hamming_dist_top_k"),
    f"{OPS}/test_kv_quant_sparse_flash_attention.py": NotEmulated("_C_ascend::npu_kv_quant_sparse_flash_attention"),
    f"{OPS}/test_mla_preprocess.py": MLA,
    f"{OPS}/test_mla_preprocess_nq.py": MLA,
    f"{OPS}/test_mla_preprocess_qdown.py": MLA,
    f"{OPS}/test_ngram_spec_decode.py": NotEmulated("_C_ascend::npu_ngram_spec_decode"),
    f"{OPS}/test_npu_hc_pre.py": NotEmulated("_C_ascend::npu_hc_pre", "_C_ascend::npu_hc_pre_v2"),
    f"{OPS}/test_recurrent_gated_delta_rule.py": NotEmulated("_C_ascend::npu_recurrent_gated_delta_rule"),
    f"{OPS}/test_recurrent_gated_delta_rule_310.py": NotEmulated("_C_ascend::npu_recurrent_gated_delta_rule_310"),
    f"{OPS}/test_reshape_and_cache_bnsd.py": NotEmulated("_C_ascend::npu_reshape_and_cache_bnsd"),
    f"{OPS}/test_store_kv_block.py": NotEmulated("_C_ascend::store_kv_block", "_C_ascend::store_kv_block_metadata"),
    f"{OPS}/test_transpose_kv_cache_by_block.py": NotEmulated("_C_ascend::transpose_kv_cache_by_block"),
    "single_node/ops/multicard_ops_a2/test_matmul_allreduce_add_rmsnorm.py": NotEmulated(
        "_C_ascend::matmul_allreduce_add_rmsnorm"
    ),
    "single_node/ops/multicard_ops_a3/test_dispatch_ffn_combine.py": FFN,
    "single_node/ops/multicard_ops_a3/test_dispatch_ffn_combine_bf16.py": FFN,
    "single_node/ops/multicard_ops_a3/test_dispatch_ffn_combine_w4a8.py": FFN,
    "single_node/ops/multicard_ops_a3/test_dispatch_gmm_combine_decode.py": NotEmulated(
        "_C_ascend::dispatch_gmm_combine_decode"
    ),
}
# The names of these say why: kernels in Triton, which triton-ascend compiles for an NPU; operators of an Atlas 300I.
FOLDERS = (f"{OPS}/triton", "310p/single_node/ops/singlecard_ops")


@cache
def whole() -> set[str]:
    """What is emulated: operators that are replaced as a whole, and aclnn functions."""
    return {*inventory(folders())["whole"], *operators(folders())}


def golden_files() -> list[str]:
    """Every test file of operators in the source, from the folder of the nightly tests."""
    found = (path.relative_to(NIGHTLY) for path in NIGHTLY.rglob("test_*.py"))
    return sorted(str(path) for path in found if "ops" in path.parts)


def in_folders() -> set[str]:
    return {file for file in golden_files() if str(Path(file).parent) in FOLDERS}


def test_every_file_is_run_or_left_out() -> None:
    assert set(golden_files()) == {*RUN, *LEFT_OUT, *in_folders()}
    assert len(golden_files()) == len(RUN) + len(LEFT_OUT) + len(in_folders())  # each in one of them
    assert set(FOLDERS) == {str(Path(file).parent) for file in in_folders()}


@pytest.mark.parametrize("file", LEFT_OUT)
def test_the_reason_to_leave_a_file_out_holds(file: str) -> None:
    LEFT_OUT[file].check((NIGHTLY / file).read_text())


@pytest.mark.parametrize("file", RUN)
def test_golden(file: str) -> None:
    # -P: its own vllm_ascend, beside the tests, is not built. Its conftest files want packages that are not needed.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", "--import-mode=append"]
    command += [
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        "-p",
        "softnpu_engines_goldens",
        str(NIGHTLY / file),
    ]
    env = {**npu_environment(ours=False, sequence_parallel=False), "ASCEND_MOE_SOFTNPU_MEMORY": "16G"}
    done = subprocess.run(command, cwd=SOURCE, env=env, capture_output=True, text=True, timeout=800, check=False)
    last = done.stdout.strip().splitlines()[-1]
    assert last.split(" in ")[0] == RUN[file], done.stdout[-5000:]
