"""Stand-ins for the shared libraries of CANN, so that the real torch_npu wheel can be imported without an NPU.

Every function answers with an error, so there are no devices; what remains are the real operators' schemas and shape
functions. Test-only: never to be loaded where CANN is installed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
PREFIXES = ("acl", "Hccl", "Msprof", "rtDev", "rtFunc", "rtGet", "rtKernel")
AN_ACL_ERROR = 507899
SPECIAL = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { *n = 0; return 0; }",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no NPU here"; }',
    "aclrtGetSocName": "const char *aclrtGetSocName(void) { return 0; }",
}


def build(torch_npu: Path, target: Path) -> None:
    """Compile into `target` libraries that define what the wheel unpacked at `torch_npu` leaves undefined."""
    binaries = [*torch_npu.glob("_C*.so"), *torch_npu.glob("lib/lib*.so")]
    listing = subprocess.run(["nm", "-D", "--undefined-only", *binaries], capture_output=True, text=True, check=True)
    words = {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines() if line.startswith(" ")}
    names = sorted(word for word in words if word.startswith(PREFIXES))
    target.mkdir(parents=True, exist_ok=True)
    functions = [SPECIAL.get(name, f"int {name}(void) {{ return {AN_ACL_ERROR}; }}") for name in names]
    (target / "stub.c").write_text("\n".join(functions) + "\n")
    (target / "empty.c").write_text("typedef int empty;\n")
    for library in LIBRARIES:
        source = target / ("stub.c" if library == "ascendcl" else "empty.c")
        output = ["-o", target / f"lib{library}.so", f"-Wl,-soname,lib{library}.so"]
        subprocess.run(["cc", "-shared", "-fPIC", "-w", *output, source], check=True)
