# Source this file in a recipe: environment variables of accelerators, the node's place in the job, and `launch`.
#
# Before it a recipe may set RECIPE_NNODES, the nodes it is written for, and PLATFORM: A2, A3, A5 (Ascend 950) or gpu.
# From the environment, with defaults: NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT; under SLURM the last
# four follow from its variables. Further: OUTPUT_DIR, LOG_DIR, DEVICE (npu, cuda, cpu), DEVICE_MEMORY (GiB).
#
#   launch CONFIG.yaml --group.name value ...
#
# plans instead of training with DRY_RUN=1 (on any machine, without data), prints the words with DRY_RUN=words, else
# looks for mistakes first (`tools/preflight.py`) and becomes torchrun; the log is kept and so is the exit status.

export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1800}
export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-2}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

# The first name of a SLURM node list, which is the node of SLURM_NODEID 0.
_first_slurm_node() {
    local first
    read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    echo "$first"
}

case "${PLATFORM:-}" in
A3) NPUS_PER_NODE=${NPUS_PER_NODE:-16} DEVICE=${DEVICE:-npu} DEVICE_MEMORY=${DEVICE_MEMORY:-56} ;;
A5) NPUS_PER_NODE=${NPUS_PER_NODE:-8} DEVICE=${DEVICE:-npu} DEVICE_MEMORY=${DEVICE_MEMORY:-112} ;;
gpu) NPUS_PER_NODE=${NPUS_PER_NODE:-8} DEVICE=${DEVICE:-cuda} DEVICE_MEMORY=${DEVICE_MEMORY:-72} ;;
*) NPUS_PER_NODE=${NPUS_PER_NODE:-8} DEVICE=${DEVICE:-npu} DEVICE_MEMORY=${DEVICE_MEMORY:-56} ;;
esac
NNODES=${NNODES:-${SLURM_NNODES:-${RECIPE_NNODES:-1}}}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
if [ -z "${MASTER_ADDR:-}" ]; then
    if [ -n "${SLURM_JOB_NODELIST:-}" ] && [ "$NNODES" -gt 1 ]; then
        MASTER_ADDR=$(_first_slurm_node)
    else
        MASTER_ADDR=localhost
    fi
fi
MASTER_PORT=${MASTER_PORT:-6499}
WORLD_SIZE=$((NPUS_PER_NODE * NNODES))
LOG_DIR=${LOG_DIR:-logs}

launch() {
    local name config="$1" words word
    name=$(basename "$0" .sh)
    local output_dir="${OUTPUT_DIR:-outputs/$name}"
    shift
    case "${DRY_RUN:-0}" in
    0) ;;
    words)
        printf '%s\n' "$config" "$@" --parallel.world_size "$WORLD_SIZE"
        return
        ;;
    *)
        source tools/setup_env.sh
        exec python tools/plan.py "$config" --device "${PLATFORM:-$DEVICE}" --parallel.device_memory "$DEVICE_MEMORY" \
            "$@" --parallel.world_size "$WORLD_SIZE"
        ;;
    esac
    for word in MODEL TOKENIZER DATA; do
        if [ -z "${!word:-}" ]; then
            echo "error: $name needs $word, for example $word=/path/that/all/nodes/see (DRY_RUN=1 plans without)" >&2
            exit 2
        fi
    done
    # What the environment says goes first: the recipe's and the user's own words win.
    words=("$config" --data.dataset "$DATA" --model.tokenizer_name_or_path "$TOKENIZER"
        --training.output_dir "$output_dir" "$@")
    source tools/setup_env.sh
    python tools/preflight.py --device "$DEVICE" --devices "$NPUS_PER_NODE" --nodes "$NNODES" --node-rank "$NODE_RANK" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --shared "$output_dir" -- "${words[@]}"
    mkdir -p "$LOG_DIR"
    # exec: signals reach torchrun, and its exit status is the recipe's.
    exec torchrun --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$NPUS_PER_NODE" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" train_fsdp2.py "${words[@]}" \
        > >(exec tee -i "$LOG_DIR/${name}_$(date +%Y-%m-%d_%H-%M-%S)_node$NODE_RANK.log") 2>&1
}
