#!/usr/bin/env bash
# Qwen3-235B-A22B, 4K, bf16: pre-training on 16 nodes of 8 cards of NVIDIA GPUs.
#
#   TOKENIZER=... DATA=... bash examples/fsdp2/qwen3_moe/pretrain_qwen3_235b_4k_fsdp2_gpu.sh [--group.name value ...]
#
# on every node; with DRY_RUN=1 it plans instead, on any machine and without data. See docs/cluster.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
PLATFORM=gpu
RECIPE_NNODES=16
source examples/fsdp2/env_config.sh

MODEL=${MODEL:-configs/models/qwen3_235b_a22b} # config.json, and weights unless --model.train_from_scratch
TOKENIZER=${TOKENIZER:-} # tokenizer.json or a sentencepiece .model
DATA=${DATA:-} # prefix of .bin/.idx that tools/preprocess_data.py wrote

launch examples/fsdp2/qwen3_moe/pretrain_qwen3_235b_4k_fsdp2_gpu.yaml \
    --model.model_name_or_path "$MODEL" \
    --parallel.fsdp_size "$WORLD_SIZE" \
    "$@"
