"""Stand-ins for the shared libraries of CANN, so that the real torch_npu wheel can be imported without an NPU.

There is one device that can do nothing: setting it up succeeds, every allocation, copy and launch is refused. What
remains are the real operators' schemas, shape functions and, on fake tensors, autograd. Test-only: never to be loaded
where CANN is installed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi")
PREFIXES = ("acl", "Hccl", "Msprof", "rtDev", "rtFunc", "rtGet", "rtKernel")
AN_ACL_ERROR = 507899
SPECIAL = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { *n = 1; return 0; }",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no NPU here"; }',
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend950PR_stub"; }',
    "aclrtGetDevice": "int aclrtGetDevice(int *d) { *d = 0; return 0; }",
    "aclrtGetCurrentContext": "int aclrtGetCurrentContext(void **p) { static int c; *p = &c; return 0; }",
    "aclrtGetMemInfo": "int aclrtGetMemInfo(int a, size_t *f, size_t *t) { *f = *t = 1ul << 30; return 0; }",
    "aclrtGetSysParamOpt": "int aclrtGetSysParamOpt(int o, long long *v) { *v = 0; return 0; }",
}
HANDLES = (
    "aclrtCreateStream",
    "aclrtCreateStreamWithConfig",
    "aclrtCreateEvent",
    "aclrtCreateEventExWithFlag",
    "aclrtCreateEventWithFlag",
)
REFUSED = ("aclrtMalloc", "aclrtMemcpy", "aclopCompileAndExecute", "rtKernelLaunch")
OPERATORS = ("aclnnSoftmax", "aclnnSoftmaxGetWorkspaceSize")  # which torch_npu looks for before it asks for shapes
LOOKED_UP = (  # with dlsym, so that nm does not list them
    "aclrtCreateEventWithFlag",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtDestroyStreamForce",
    "aclrtMallocAlign32",
    "aclrtGetSysParamOpt",
    "aclrtSetSysParamOpt",
    "aclrtSynchronizeDeviceWithTimeout",
)


def build(torch_npu: Path, target: Path) -> None:
    """Compile into `target` libraries that define what the wheel unpacked at `torch_npu` leaves undefined."""
    binaries = [*torch_npu.glob("_C*.so"), *torch_npu.glob("lib/lib*.so")]
    listing = subprocess.run(["nm", "-D", "--undefined-only", *binaries], capture_output=True, text=True, check=True)
    words = {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines() if line.startswith(" ")}
    names = sorted({word for word in words if word.startswith(PREFIXES)} | set(LOOKED_UP))
    target.mkdir(parents=True, exist_ok=True)
    functions = [_function(name) for name in names]
    (target / "stub.c").write_text("\n".join(["#include <stddef.h>", *functions]) + "\n")
    operators = [f"int {name}(void) {{ return {AN_ACL_ERROR}; }}" for name in OPERATORS]
    (target / "operators.c").write_text("\n".join(operators) + "\n")
    (target / "empty.c").write_text("typedef int empty;\n")
    sources = {"ascendcl": "stub.c", "acl_op_compiler": "stub.c", "opapi": "operators.c"}
    for library in LIBRARIES:
        source = target / sources.get(library, "empty.c")
        output = ["-o", target / f"lib{library}.so", f"-Wl,-soname,lib{library}.so"]
        subprocess.run(["cc", "-shared", "-fPIC", "-w", *output, source], check=True)


def _function(name: str) -> str:
    if name in HANDLES:
        return f"int {name}(void **p) {{ static int c; *p = &c; return 0; }}"
    return SPECIAL.get(name, f"int {name}(void) {{ return {AN_ACL_ERROR if name.startswith(REFUSED) else 0}; }}")
