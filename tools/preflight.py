"""Look for what would stop a job on several nodes before torchrun starts: it ends here within a minute, in words.

    python tools/preflight.py --device npu --devices 8 --nodes 2 --node-rank 0 --master-addr 10.0.0.1 \\
        --master-port 6499 --shared outputs/run -- CONFIG.yaml --group.name value ...

Run once on every node, as the recipes in examples/fsdp2 do. In this order: the job itself is right (a dry run of
train_fsdp2.py for all its processes); the devices of this node are seen; all nodes meet at MASTER_ADDR:MASTER_PORT, run
the same commit with the same words, and see the same shared folder. Exit status 2 where not; each node says why. Nodes
meet by plain TCP on the port that torchrun will use; it is free again afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdp2.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]
MARK = ".preflight"


def main(argv: list[str]) -> int:
    position = argv.index("--") if "--" in argv else len(argv)
    options, words = _options(argv[:position]), argv[position + 1 :]
    try:
        if words:
            check_job(words, options.nodes * options.devices)
        check_devices(options.device, options.devices)
        if options.nodes == 1:
            check_port(options.master_addr, options.master_port)
        else:
            meet(options, {"commit": commit(), "words": words})
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("npu", "cuda", "cpu"), required=True)
    parser.add_argument("--devices", type=int, required=True, help="processes of this node, one a device")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--shared", type=Path, required=True, help="a folder that all nodes must see")
    parser.add_argument("--timeout", type=float, default=45, help="seconds to wait for the other nodes")
    return parser.parse_args(argv)


def check_devices(device: str, wanted: int) -> None:
    """Refuse a node with another kind of device, or fewer, than it starts processes for (a CPU takes any number)."""
    from mindspeed_llm.training.distributed import device_count

    kind, count = device_count()
    if kind != device:
        raise ConfigurationError(
            f"DEVICE={device}: on this node torch sees {count} {kind} device(s) and no {device}; "
            "DRY_RUN=1 plans without"
        )
    if kind != "cpu" and count < wanted:
        raise ConfigurationError(f"NPUS_PER_NODE={wanted}: on this node torch sees {count} {kind} device(s)")


def check_job(words: list[str], world_size: int) -> None:
    """Dry-run the job, in this process; what that finds wrong is what is said."""
    import train_fsdp2

    words = [*words, "--training.dry_run", "--parallel.world_size", str(world_size)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = train_fsdp2.main(words)
    if status:
        message = said.getvalue().strip().removeprefix("error: ")
        raise ConfigurationError(message or f"the dry run ended with status {status}")


def check_port(address: str, port: int) -> None:
    with _listening(address, port):
        pass


def commit() -> str:
    """The commit of this node's working tree, with what is changed in it; empty where it is no git repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=, changed"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def meet(options: argparse.Namespace, mine: dict) -> None:
    """Compare what every node says of itself; node 0 listens, the others connect.

    Raises:
        ConfigurationError: on every node that takes part: who is missing, or what differs.
    """
    if not 0 <= options.node_rank < options.nodes:
        raise ConfigurationError(f"NODE_RANK={options.node_rank}: allowed is 0 to {options.nodes - 1} (NNODES - 1)")
    verdict = _lead(options, mine) if options.node_rank == 0 else _follow(options, mine)
    if verdict:
        raise ConfigurationError(verdict)


def _lead(options: argparse.Namespace, mine: dict) -> str:
    """Node 0: collect, judge, tell. Returns what is wrong, or nothing."""
    token, deadline = secrets.token_hex(8), time.monotonic() + options.timeout
    mark = options.shared / MARK
    try:
        options.shared.mkdir(parents=True, exist_ok=True)
        mark.write_text(token)
    except OSError as error:
        raise ConfigurationError(f"{options.shared} cannot be written: {error.strerror}") from error
    said: dict[int, dict] = {0: mine}
    with _listening(options.master_addr, options.master_port) as server, contextlib.ExitStack() as stack:
        connections = []
        twice = ""
        while len(said) < options.nodes and not twice and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
                stack.enter_context(connection)
                connection.settimeout(max(1.0, deadline - time.monotonic()))
                _send(connection, {"token": token})
                theirs = _receive(connection)
            except (TimeoutError, OSError, ValueError):
                continue  # not one of ours, or gone
            connections.append(connection)
            if theirs["node"] in said:
                twice = f"two nodes say NODE_RANK={theirs['node']}: every node needs its own"
            said[theirs["node"]] = theirs
        verdict = twice or _judge(said, options)
        for connection in connections:
            with contextlib.suppress(OSError):
                _send(connection, {"verdict": verdict})
                connection.recv(1)  # they close first, so that the port is free at once
    mark.unlink(missing_ok=True)
    return verdict


def _judge(said: dict[int, dict], options: argparse.Namespace) -> str:
    missing = [str(node) for node in range(options.nodes) if node not in said]
    if missing:
        return (
            f"node {', '.join(missing)} of {options.nodes} did not come to {options.master_addr}:{options.master_port} "
            f"within {options.timeout:g} s: was it started there, with this MASTER_ADDR and its own NODE_RANK?"
        )
    for node, theirs in sorted(said.items()):
        if theirs["commit"] != said[0]["commit"]:
            return f"node {node} has commit {theirs['commit']}, node 0 {said[0]['commit']}: check out the same on all"
        if theirs["words"] != said[0]["words"]:
            different = sorted(set(theirs["words"]) ^ set(said[0]["words"]))
            return f"node {node} was started with other words than node 0: {' '.join(different) or 'their order'}"
        if node and not theirs["sees_shared"]:
            return (
                f"node {node} does not see what node 0 wrote into {options.shared}: it must lie on a file system that "
                "all nodes share (set OUTPUT_DIR)"
            )
    return ""


def _follow(options: argparse.Namespace, mine: dict) -> str:
    """Another node: connect as long as there is time, say who it is, hear the verdict."""
    deadline = time.monotonic() + options.timeout
    last = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((options.master_addr, options.master_port), timeout=min(left, 5)) as server:
                server.settimeout(options.timeout + 5)  # node 0 may wait for others as long again
                token = _receive(server)["token"]
                mark = options.shared / MARK
                sees = mark.is_file() and mark.read_text() == token
                _send(server, {"node": options.node_rank, "sees_shared": sees, **mine})
                return _receive(server)["verdict"]
        except socket.gaierror as error:
            last = f"the name does not resolve ({error.strerror})"
            time.sleep(min(1.0, max(left, 0)))
        except (OSError, ValueError, KeyError) as error:
            last = getattr(error, "strerror", None) or str(error) or type(error).__name__
            time.sleep(min(0.5, max(left, 0)))
    return (
        f"node 0 did not answer at MASTER_ADDR={options.master_addr} MASTER_PORT={options.master_port} within "
        f"{options.timeout:g} s ({last}): is it started there, and is this its address?"
    )


def _listening(address: str, port: int) -> socket.socket:
    """A server at an address of this node."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigurationError(f"MASTER_ADDR={address}: the name does not resolve ({error.strerror})") from error
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(where)
        server.listen()
    except OSError as error:
        server.close()
        if error.errno == 99:  # EADDRNOTAVAIL
            raise ConfigurationError(
                f"MASTER_ADDR={address} is not an address of this node, which has NODE_RANK 0: it must be node 0's"
            ) from error
        raise ConfigurationError(
            f"MASTER_PORT={port} cannot be used on this node ({os.strerror(error.errno)}); set a free one, on all nodes"
        ) from error
    return server


def _send(connection: socket.socket, message: dict) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict:
    with connection.makefile("rb") as stream:
        line = stream.readline()
    if not line:
        raise ValueError("the connection was closed")
    return json.loads(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
