#!/usr/bin/env bash
# DeepSeek-V3.1 on one Atlas A2 server: 8 NPUs as 2 data-parallel engines of 4 tensor-parallel ranks, with sequence
# parallelism, experts spread over all 8.
#
#   examples/serve_atlas_a2.sh /path/to/DeepSeek-V3.1-W4A8 [more vllm serve flags, which override those below]
#
# Needs CANN, torch-npu, vLLM 0.23.0 and vllm-ascend 0.23.0 on the host. vllm-ascend brings the NPU platform, its kernels and
# its MoE layers; this package replaces two of its operators and what reads their results by the padded forms (see
# docs/vllm_ascend.md; the log says what was replaced).
# Not run on hardware by this project yet: `make softnpu-engines` runs it on the soft NPU with a tiny model. Every flag is
# explained so that it can be checked.
set -euo pipefail
model="${1:?usage: serve_atlas_a2.sh MODEL [more vllm serve flags]}"
shift

# ASCEND_MOE_VLLM_ASCEND=0 runs vllm-ascend's own operators, to compare.
export ASCEND_MOE_VLLM_ASCEND="${ASCEND_MOE_VLLM_ASCEND:-1}"
# VLLM_ASCEND_ENABLE_FLASHCOMM1: sequence parallelism in vllm-ascend. Between attention layers each NPU then holds its own
#   slice of the tokens, and the MoE layers gather and reduce-scatter it: the traffic the padded layout is for. With one
#   data-parallel engine there is nothing to cut up, and our operators leave the work to vllm-ascend's.
export VLLM_ASCEND_ENABLE_FLASHCOMM1=1
# HCCL_BUFFSIZE: MiB of device memory per communicator. Decode with the dispatch/combine operators needs
#   ((tokens * ranks * min(experts per rank, top-k) * hidden * 2 B) + 2 MiB) * 2; the default of 200 is too small for
#   128 tokens on 16 ranks (452 MiB), which shows up as "MTE out of range".
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-512}"
# HCCL_OP_EXPANSION_MODE=AIV: collectives are scheduled on the NPU's vector cores, with less host work per launch.
export HCCL_OP_EXPANSION_MODE="${HCCL_OP_EXPANSION_MODE:-AIV}"
# OMP_PROC_BIND, OMP_NUM_THREADS: keep host threads from wandering.
export OMP_PROC_BIND=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-10}"
# Reuse freed device memory in segments: long prompts of varying length fragment it otherwise.
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
# QUANTIZATION: W4A8 weights as vllm-ascend reads them; empty for a floating-point checkpoint.
quantization="${QUANTIZATION-ascend}"

# --data-parallel-size 2, --tensor-parallel-size 4
#                                 attention is split over 4 NPUs and repeated twice
# --enable-expert-parallel        experts are spread over the same 8 NPUs instead of being split
# --max-model-len, --max-num-batched-tokens
#                                 16K in, 1K out; prefill in one piece
# --max-num-seqs                  concurrent sequences per engine
# --gpu-memory-utilization        share of device memory for weights and KV cache
# --trust-remote-code             the published checkpoint brings its own configuration class
exec vllm serve "$model" \
  --data-parallel-size 2 \
  --tensor-parallel-size 4 \
  --enable-expert-parallel \
  ${quantization:+--quantization "$quantization"} \
  --max-model-len 17408 \
  --max-num-batched-tokens 16384 \
  --max-num-seqs 32 \
  --gpu-memory-utilization 0.92 \
  --trust-remote-code \
  "$@"
