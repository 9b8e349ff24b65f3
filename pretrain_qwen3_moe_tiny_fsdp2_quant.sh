#!/usr/bin/env bash
# Pre-train a small Qwen3-MoE in MXFP8 on FSDP2, from nothing: environment, corpus, tokenizer, data, training, report.
#
#   bash pretrain_qwen3_moe_tiny_fsdp2_quant.sh [--group.name value ...]      further words go to train_fsdp2.py last
#   bash pretrain_qwen3_moe_tiny_fsdp2_quant.sh --compare bf16 [...]          trains in bf16 first, then quantized, and
#                                                 puts both side by side in OUTPUT_DIR/compare.html (also: a recipe name)
#
# Runs on all local NPUs or GPUs, else on the CPU. To make it yours, copy it and change the settings below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup_env.sh

COMPARE=
WORDS=()
while [ $# -gt 0 ]; do
    case "$1" in
    --compare) COMPARE=${2:?--compare needs bf16 or the name of a recipe} && shift 2 ;;
    *) WORDS+=("$1") && shift ;;
    esac
done

# ---- settings -------------------------------------------------------------------------------------------------------
MODEL=configs/models/qwen3_moe_tiny # a Hugging Face config.json
OUTPUT_DIR=${OUTPUT_DIR:-outputs/pretrain_qwen3_moe_tiny_fsdp2_quant}
DATA_DIR=${DATA_DIR:-outputs/data/python_library} # corpus, tokenizer and tokens are made once and used again
MAX_STEPS=${MAX_STEPS:-320}
VOCABULARY=8192
SPLIT=98,2,0 # documents to train on, to hold out, unused

# ---- processes ------------------------------------------------------------------------------------------------------
DEVICES=$(python -c 'from mindspeed_llm.training.distributed import device_count; print(*device_count())')
read -r DEVICE DEVICE_COUNT <<<"$DEVICES"
if [ "$DEVICE" = cpu ]; then
    NPROC_PER_NODE=${NPROC_PER_NODE:-2}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((DEVICE_COUNT > NPROC_PER_NODE ? DEVICE_COUNT / NPROC_PER_NODE : 1))}
    # glibc gives freed memory back and pays page faults for it again in every step; keeping it saves about a tenth.
    export MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=2000000000 MALLOC_TOP_PAD_=268435456
else
    NPROC_PER_NODE=${NPROC_PER_NODE:-$DEVICE_COUNT}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
fi
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
if [ "$NNODES" = 1 ]; then # any free port; several nodes must agree on one
    MASTER_PORT=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
fi
MASTER_PORT=${MASTER_PORT:-29500}
WORLD_SIZE=$((NNODES * NPROC_PER_NODE))

# ---- data -----------------------------------------------------------------------------------------------------------
mkdir -p "$DATA_DIR"
if [ ! -f "$DATA_DIR/corpus.jsonl" ]; then
    python tools/build_corpus.py --output "$DATA_DIR/corpus.jsonl"
fi
if [ ! -f "$DATA_DIR/tokenizer/tokenizer.model" ]; then
    python tools/train_tokenizer.py --input "$DATA_DIR/corpus.jsonl" --output-folder "$DATA_DIR/tokenizer" \
        --vocab-size "$VOCABULARY" --split "$SPLIT"
fi
if [ ! -f "$DATA_DIR/tokens_text_document.idx" ]; then
    python tools/preprocess_data.py --input "$DATA_DIR/corpus.jsonl" --output-prefix "$DATA_DIR/tokens" \
        --tokenizer-name-or-path "$DATA_DIR/tokenizer" --append-eod --workers 2
fi

# ---- training -------------------------------------------------------------------------------------------------------
MODEL_ARGS=(
    --model.model_name_or_path "$MODEL"
    --model.tokenizer_name_or_path "$DATA_DIR/tokenizer"
    --model.train_from_scratch
)
# Linear layers and experts compute in MXFP8; their weights are quantized before the all-gather, so that 1.03 bytes a
# weight travel instead of 2. --model.quant_recipe_name None turns all of it off.
QUANT_ARGS=(
    --model.quant_recipe_name mxfp8
    --model.quant_converters quantize.linear.mx quantize.moe.mx
    --model.enable_fsdp_low_precision_all_gather
)
DATA_ARGS=(
    --data.dataset "$DATA_DIR/tokens_text_document"
    --data.split "$SPLIT"
    --data.cutoff_len 256
)
PARALLEL_ARGS=(
    --parallel.fsdp_size "$WORLD_SIZE"
)
# 8 sequences x 256 tokens = 2,048 tokens a step on 2 processes.
TRAINING_ARGS=(
    --training.stage pt
    --training.output_dir "$OUTPUT_DIR"
    --training.max_steps "$MAX_STEPS"
    --training.per_device_train_batch_size 4
    --training.optimizer fused_adamw
    --training.lr 1.5e-3
    --training.min_lr 1e-4
    --training.warmup_ratio 0.05
    --training.weight_decay 0.1
    --training.router_aux_loss_coef 0.001
    --training.save_steps 200
    --training.quant_stats_steps 50
)
ARGS=("${MODEL_ARGS[@]}" "${QUANT_ARGS[@]}" "${DATA_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${WORDS[@]}")

# One process looks for mistakes first: they end the job here, in seconds, with one message and status 2.
WORLD_SIZE=$WORLD_SIZE python train_fsdp2.py "${ARGS[@]}" --training.dry_run >/dev/null

LAUNCH=(torchrun --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$NPROC_PER_NODE"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" train_fsdp2.py "${ARGS[@]}")
LOG=$OUTPUT_DIR/log_node$NODE_RANK.txt

if [ -n "$COMPARE" ]; then
    OTHER=$OUTPUT_DIR/$COMPARE
    mkdir -p "$OTHER"
    [ "$COMPARE" = bf16 ] && RECIPE=None || RECIPE=$COMPARE
    "${LAUNCH[@]}" --training.output_dir "$OTHER" --model.quant_recipe_name "$RECIPE" 2>&1 |
        tee -i "$OTHER/log_node$NODE_RANK.txt"
    "${LAUNCH[@]}" 2>&1 | tee -i "$LOG"
    if [ "$NODE_RANK" = 0 ]; then
        python tools/compare_runs.py "$OTHER" "$OUTPUT_DIR" -o "$OUTPUT_DIR/compare.html"
    fi
    exit
fi

# exec: signals reach torchrun, and its exit status is this script's; the log is written beside it.
exec "${LAUNCH[@]}" > >(exec tee -i "$LOG") 2>&1
