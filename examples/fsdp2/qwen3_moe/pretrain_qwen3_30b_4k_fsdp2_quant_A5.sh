#!/usr/bin/env bash
# Qwen3-30B-A3B, 4K, MXFP8: pre-training on 8 cards of Ascend 950 (A5).
#
#   TOKENIZER=... DATA=... bash examples/fsdp2/qwen3_moe/pretrain_qwen3_30b_4k_fsdp2_quant_A5.sh [--group.name value ...]
#
# on every node; with DRY_RUN=1 it plans instead, on any machine and without data. See docs/cluster.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
PLATFORM=A5
RECIPE_NNODES=1
source examples/fsdp2/env_config.sh

MODEL=${MODEL:-configs/models/qwen3_30b_a3b} # config.json, and weights unless --model.train_from_scratch
TOKENIZER=${TOKENIZER:-} # tokenizer.json or a sentencepiece .model
DATA=${DATA:-} # prefix of .bin/.idx that tools/preprocess_data.py wrote

QUANT_ARGS=(
    --model.quant_recipe_name mxfp8
    --model.quant_format E4M3
    --model.quant_block_size 32
    --model.enable_fsdp_low_precision_all_gather
    --model.quant_converters quantize.linear.mx quantize.moe.mx
    --parallel.efsdp_shard_placement_fn shard_by_dim_0
)

launch examples/fsdp2/qwen3_moe/pretrain_qwen3_30b_4k_fsdp2_A5.yaml \
    --model.model_name_or_path "$MODEL" \
    --parallel.fsdp_size "$WORLD_SIZE" \
    "${QUANT_ARGS[@]}" "$@"
