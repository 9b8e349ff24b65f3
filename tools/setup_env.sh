# Source this file: afterwards the first `python` on PATH has everything in requirements.txt.
#
#   source tools/setup_env.sh                 what a run needs
#   SETUP_TESTS=1 source tools/setup_env.sh   and what the tests need
#
# The active Python is used as it is when it has all of it already, as in an Ascend container with its own torch and
# torch_npu. Otherwise .venv is made once. Where the active Python has the right torch, .venv sees its packages and adds
# only what is missing; nothing is ever installed into a Python that is not ours. (Programs of the active Python, such as
# its torchrun, do not see .venv: hence the one written below.)
#
# pip takes packages from wherever it is configured to. To get torch's smaller CPU build where pip would choose the CUDA
# one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

_setup_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Prints the lines of the requirement files that the given Python does not meet, without network; fails below 3.11.
_setup_missing() {
    local python="$1"
    shift
    "$python" - "$@" <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(1)
import re
from importlib import metadata

def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]

def good_enough(name, wanted, installed):
    if name == "torch":
        return installed[:2] == wanted[:2]
    leading = next((i for i, n in enumerate(wanted) if n), 0) + 1
    return installed[:leading] >= wanted[:leading]

for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        requirement = line.split("#")[0].strip()
        if not requirement:
            continue
        name, wanted = requirement.split("==")
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = ""
        if not installed or not good_enough(name, numbers(wanted), numbers(installed)):
            print(requirement)
PY
}

# Prints the path of the first Python of at least 3.11: the active one, else a versioned name.
_setup_find_python() {
    local name
    for name in python python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    echo "setup_env: Python 3.11 or newer is needed, and none is on PATH" >&2
    return 1
}

_setup_make_venv() {
    local venv="$1" base missing
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        base="$(_setup_find_python)" || return 1
        missing="$(_setup_missing "$base" "$_setup_root/requirements.txt")" || return 1
        echo "setup_env: making $venv with $base (once)" >&2
        "$base" -m venv --clear "$venv" || return 1
        if ! grep -q '^torch==' <<<"$missing"; then
            "$base" -c 'import site; [print(f"import site; site.addsitedir({p!r})") for p in site.getsitepackages()]' \
                >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/active_python.pth" || return 1
            printf '#!/bin/sh\nexec "%s/bin/python" -m torch.distributed.run "$@"\n' "$venv" >"$venv/bin/torchrun"
            chmod +x "$venv/bin/torchrun"
        fi
    fi
    missing="$(_setup_missing "$venv/bin/python" "${_setup_files[@]}")" || return 1
    if [ -n "$missing" ]; then
        echo "setup_env: installing" $missing >&2
        # shellcheck disable=SC2086  # one word a requirement
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check $missing || return 1
    fi
    if [ -n "${_setup_nodeps:-}" ]; then
        missing="$(_setup_missing "$venv/bin/python" "$_setup_nodeps")" || return 1
        if [ -n "$missing" ]; then
            echo "setup_env: installing without dependencies" $missing >&2
            # shellcheck disable=SC2086
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $missing || return 1
        fi
    fi
}

_setup_files=("$_setup_root/requirements.txt")
_setup_nodeps=""
if [ "${SETUP_TESTS:-0}" = 1 ]; then
    _setup_files+=("$_setup_root/requirements-test.txt")
    _setup_nodeps="$_setup_root/requirements-test-nodeps.txt"
fi
_setup_status=0
if ! { command -v python >/dev/null &&
    _setup_lacks="$(_setup_missing python "${_setup_files[@]}" ${_setup_nodeps:+"$_setup_nodeps"})" &&
    [ -z "$_setup_lacks" ]; }; then
    if _setup_make_venv "$_setup_root/.venv"; then
        export PATH="$_setup_root/.venv/bin:$PATH" VIRTUAL_ENV="$_setup_root/.venv"
        hash -r
    else
        echo "setup_env: no environment could be made; see the messages above" >&2
        _setup_status=1
    fi
fi
unset -f _setup_missing _setup_find_python _setup_make_venv
unset _setup_root _setup_files _setup_nodeps _setup_lacks
eval "unset _setup_status; return $_setup_status 2>/dev/null || exit $_setup_status"
