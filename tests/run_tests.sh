#!/usr/bin/env bash
# Set up and run every test that needs no accelerator:  bash tests/run_tests.sh [pytest words]
# For example: bash tests/run_tests.sh tests/training -k schedule
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SETUP_TESTS=1 source tools/setup_env.sh

# Most multi-process tests run 2 processes: processes x threads = cores.
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 1 ? cores / 2 : 1))}
export TOKENIZERS_PARALLELISM=false

# gloo binds to the address of the host's own name; where that does not resolve, one machine's tests use loopback.
if [ -z "${GLOO_SOCKET_IFNAME:-}" ] &&
    ! python -c 'import socket; socket.getaddrinfo(socket.gethostname(), None)' 2>/dev/null; then
    export GLOO_SOCKET_IFNAME=lo
fi
exec python -m pytest "$@"
