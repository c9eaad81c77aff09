#!/usr/bin/env bash
# Serves a MoE model on this CPU: two engines (data parallel) that share the experts (expert parallel).
#
#   examples/serve_cpu.sh MODEL [more vllm serve flags]
#
# Without a MODEL, a tiny one with random weights is made, so that the server can be tried at once:
#
#   curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' \
#        -d '{"model": "tiny", "prompt": "Hello", "max_tokens": 8}'
set -euo pipefail
cd "$(dirname "$0")/.."
make --silent setup

case "${1:-}" in
"" | -*)
  model="${TMPDIR:-/tmp}/vllm-ascend-moe-tiny"
  .venv/bin/python -c "
import sys; from pathlib import Path
from vllm_ascend_moe.testing.tiny_models import make_tiny_model
make_tiny_model('qwen3_moe', Path(sys.argv[1]))" "$model"
  set -- "$model" --served-model-name tiny --max-model-len 512 "$@"
  ;;
esac

# --data-parallel-size 2       two engines, each with its own requests and KV cache
# --enable-expert-parallel     each engine holds half of the experts instead of all of them
# --kv-cache-memory-bytes      KV cache of each engine; two engines share one machine's memory, so it is set, not guessed
# --shutdown-timeout 30        finish running requests when stopped, instead of killing the engines
# --additional-config          this plugin's own section; unknown keys and wrong values are refused by name
# CPU cores are dealt out evenly among the workers; VLLM_CPU_OMP_THREADS_BIND="0-7|8-15" decides it by hand.
exec .venv/bin/vllm serve "$@" \
  --data-parallel-size 2 \
  --enable-expert-parallel \
  --kv-cache-memory-bytes "${KV_CACHE_BYTES:-$((1 << 30))}" \
  --shutdown-timeout 30 \
  --additional-config '{"ascend_moe": {"comm": "padded_allgather"}}'
