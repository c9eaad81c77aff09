#!/usr/bin/env bash
# DeepSeek-V3.1 on one Atlas A2 server: 8 NPUs, tensor parallel with sequence parallelism, expert parallel.
#
#   examples/serve_atlas_a2.sh /path/to/DeepSeek-V3.1-W4A8 [more vllm serve flags]
#
# Needs CANN, torch-npu and vllm-ascend on the host. vllm-ascend brings the NPU platform, its kernels and its MoE layers;
# with it installed this package leaves platform, operators and layers to it (see docs/architecture.md).
# This script has not been run on hardware by this project yet; every flag is explained so that it can be checked.
set -euo pipefail
model="${1:?usage: serve_atlas_a2.sh MODEL [more vllm serve flags]}"
shift

# HCCL_BUFFSIZE: MiB of device memory per communicator. Decode with the dispatch/combine operators needs
#   ((tokens * ranks * min(experts per rank, top-k) * hidden * 2 B) + 2 MiB) * 2; the default of 200 is too small for
#   128 tokens on 16 ranks (452 MiB), which shows up as "MTE out of range".
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-512}"
# VLLM_ASCEND_ENABLE_FLASHCOMM1: sequence parallelism in vllm-ascend. Between attention layers each NPU then holds its own
#   slice of the tokens, and the MoE layers gather and reduce-scatter it: the traffic the padded layout is for.
export VLLM_ASCEND_ENABLE_FLASHCOMM1=1
# HCCL_OP_EXPANSION_MODE=AIV: collectives are scheduled on the NPU's vector cores, with less host work per launch.
export HCCL_OP_EXPANSION_MODE=AIV
# OMP_PROC_BIND, OMP_NUM_THREADS: keep host threads from wandering; host time is what limits small batches.
export OMP_PROC_BIND=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-10}"
# Reuse freed device memory in segments: long prompts of varying length fragment it otherwise.
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"

# --tensor-parallel-size 8        attention is split over the 8 NPUs
# --enable-expert-parallel        experts are spread over the same 8 NPUs instead of being split
# --quantization ascend           W4A8 weights as vllm-ascend reads them
# --max-model-len, --max-num-batched-tokens
#                                 16K in, 1K out; prefill in one piece, which is where the padded layout saves host time
# --max-num-seqs                  concurrent sequences per engine
# --gpu-memory-utilization        share of device memory for weights and KV cache
# --trust-remote-code             the published checkpoint brings its own configuration class
exec vllm serve "$model" \
  --tensor-parallel-size 8 \
  --enable-expert-parallel \
  --quantization ascend \
  --max-model-len 17408 \
  --max-num-batched-tokens 16384 \
  --max-num-seqs 32 \
  --gpu-memory-utilization 0.92 \
  --trust-remote-code \
  "$@"
