"""Nodes that cannot train together say why within a minute, before torchrun (test_cluster_page.py: two that can).

Each node is a process of its own started by hand, as from two shells; they share this machine's loopback.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import free_port
from tests.system.tiny import ROOT, environment
from tools import preflight


def start(node: int, port: int, shared: Path, *words: str, nodes: int = 2, address="127.0.0.1", timeout=4):
    """One node's part of the meeting, in a process of its own that does not import torch."""
    program = (
        "import sys; from tools import preflight\n"
        "from fsdp2.errors import ConfigurationError\n"
        "options = preflight._options(sys.argv[2:sys.argv.index('--')])\n"
        "try: preflight.meet(options, {'commit': sys.argv[1], 'words': sys.argv[sys.argv.index('--') + 1:]})\n"
        "except ConfigurationError as error: sys.exit(str(error))"
    )
    commit, *words = words or ("same",)
    places = ["--master-addr", address, "--master-port", port, "--shared", shared, "--timeout", timeout]
    options = ["--device", "cpu", "--devices", 1, "--nodes", nodes, "--node-rank", node, *places]
    command = [sys.executable, "-c", program, commit, *map(str, options), "--", *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


def outcome(*nodes: subprocess.Popen) -> list[str]:
    """What each node said; "" for a node that may go on."""
    said = [node.communicate(timeout=60)[1].strip() for node in nodes]
    assert [node.returncode for node in nodes] == [int(bool(words)) for words in said]
    return said


def test_nodes_that_agree_go_on_and_leave_the_port_free(tmp_path):
    port = free_port()
    nodes = [start(node, port, tmp_path, "c0", "a.yaml", nodes=3, timeout=20) for node in range(3)]
    assert outcome(*nodes) == ["", "", ""]
    assert not list(tmp_path.iterdir())
    with socket.socket() as torchrun:  # without SO_REUSEADDR
        torchrun.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (("c0", "a.yaml"), ("c1", "a.yaml"), "node 1 has commit c1, node 0 c0"),
        (("c0", "a.yaml", "--x", "1"), ("c0", "a.yaml", "--x", "2"), "other words than node 0: 1 2"),
    ],
    ids=["commit", "words"],
)
def test_nodes_that_differ_both_say_so(tmp_path, first, second, expected):
    port = free_port()
    said = outcome(start(0, port, tmp_path, *first, timeout=20), start(1, port, tmp_path, *second, timeout=20))
    assert all(expected in words for words in said), said


def test_a_folder_that_is_not_shared(tmp_path):
    port = free_port()
    nodes = [start(node, port, tmp_path / str(node), timeout=20) for node in range(2)]
    assert all("node 1 does not see what node 0 wrote" in words for words in outcome(*nodes))


def test_missing_nodes_and_wrong_addresses_are_said_in_time(tmp_path):
    begin = time.monotonic()
    alone = start(0, free_port(), tmp_path / "a", nodes=3)
    lost = start(1, free_port(), tmp_path / "b", address="127.0.0.77")
    twice = free_port()
    both = [start(node, twice, tmp_path / "c", nodes=3, timeout=20) for node in (0, 1, 1)]
    elsewhere = start(0, free_port(), tmp_path / "d", address="192.0.2.1")
    unnamed = start(1, free_port(), tmp_path / "e", address="no-such-host.invalid", timeout=1)
    beyond = start(2, free_port(), tmp_path / "f")
    assert "node 1, 2 of 3 did not come to" in outcome(alone)[0]
    assert "node 0 did not answer at MASTER_ADDR=127.0.0.77" in outcome(lost)[0]
    assert "two nodes say NODE_RANK=1" in outcome(*both)[0]
    assert "MASTER_ADDR=192.0.2.1 is not an address of this node" in outcome(elsewhere)[0]
    assert "the name does not resolve" in outcome(unnamed)[0]
    assert "NODE_RANK=2: allowed is 0 to 1" in outcome(beyond)[0]
    assert time.monotonic() - begin < 60


def test_devices_and_ports_of_one_node(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ["--devices", "2", "--nodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--shared", "x"]
        port = str(taken.getsockname()[1])
        assert preflight.main(["--device", "cpu", "--master-port", port, *options]) == 2
        assert f"MASTER_PORT={port} cannot be used" in capsys.readouterr().err
        assert preflight.main(["--device", "npu", "--master-port", port, *options]) == 2
        assert "and no npu" in capsys.readouterr().err


def test_a_mistake_in_the_job_is_said_before_anything_starts(capsys):
    options = ["--device", "cpu", "--devices", "2", "--nodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    assert preflight.main([*options, "--master-port", "1", "--shared", "x", "--", "--training.lrr", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: unknown flag --training.lrr; did you mean '--training.lr'?")
    assert said.count("\n") == 1
