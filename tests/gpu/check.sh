#!/usr/bin/env bash
# Everything that needs one accelerator, in under 10 minutes: bytes, GEMMs, the main job in MXFP8 and bf16, speed.
#
#   bash tests/gpu/check.sh [FOLDER]         FOLDER (outputs/gpu_check) gets figures.json, figures.md and the logs
#
# Exit status 1 when something is wrong; the other steps still run. STEPS shortens the two training runs; DEVICE=cpu tries
# the script itself. No figures of a GPU or an NPU are kept in this repository: it has not run on one yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
FOLDER=${1:-outputs/gpu_check}
STEPS=${STEPS:-50}
SIZE=${SIZE:-8192} # rows and columns of the matrix that is quantized for speed
SETUP_TESTS=1 source tools/setup_env.sh
export DEVICE=${DEVICE:-$(python -c 'from mindspeed_llm.training.distributed import device_type; print(device_type())')}
mkdir -p "$FOLDER"

failed=()
step() { # name, seconds, command...
    local name="$1" seconds="$2" status=0
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" > >(tee "$FOLDER/$name.log") 2>&1 || status=$?
    [ "$status" = 0 ] || { failed+=("$name") && echo "== $name failed with status $status (124: took over $seconds s)"; }
}

step tests 180 python -m pytest -q tests/gpu
step quantize 60 python tools/benchmarks/quantize.py --device "$DEVICE" --rows "$SIZE" --columns "$SIZE" \
    --json "$FOLDER/quantize.json"
export NPROC_PER_NODE=1 MAX_STEPS=$STEPS
OUTPUT_DIR="$FOLDER/mxfp8" step mxfp8 180 bash pretrain_qwen3_moe_tiny_fsdp2_quant.sh --training.eval_iters 8
OUTPUT_DIR="$FOLDER/bf16" step bf16 120 bash pretrain_qwen3_moe_tiny_fsdp2_quant.sh --training.eval_iters 8 \
    --model.quant_recipe_name None
step figures 60 python tests/gpu/figures.py "$FOLDER"

if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
