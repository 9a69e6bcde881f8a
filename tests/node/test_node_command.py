"""`penstock node` and `penstock node-status` as processes, with clients in this one."""

from __future__ import annotations

import grp
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from penstock.commands.node import find_socket
from penstock.config import Config, NodeConfig
from penstock.errors import ConfigError
from penstock.node.connection import connect, wait_for_frame
from tests.node.node_process import TIMEOUT_SECONDS, NodeProcess, penstock, wait_until
from tests.node.nodes import Device

ROOT = Path(__file__).parent.parent.parent
Start = Callable[..., NodeProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[NodeProcess] = []

    def begin(*arguments: object, **options: str) -> NodeProcess:
        started.append(NodeProcess("--socket", tmp_path / "node.sock", *arguments, **options))
        return started[-1]

    yield begin
    for node in started:
        node.end(signal.SIGKILL)


def test_two_clients_share_a_node_that_is_a_process(start: Start) -> None:
    node = start()
    assert node.facts["url"] == f"unix://{node.path}"
    assert node.facts["pid"] == node.process.pid
    one, two = Device(node.path, name="one"), Device(node.path, name="two")
    keys = one.keys(1, 20)
    assert one.save(keys)
    assert two.load(keys) == 20
    facts = node.status()
    assert facts["pid"] == node.process.pid
    assert facts["num_clients"] == 2
    (model,) = facts["models"]
    assert model["model"] == "tiny"
    assert sorted(model["clients"]) == ["one", "two"]
    assert model["blocks"] - model["free_blocks"] == 20
    assert model["dram_bytes"] + facts["free_bytes"] == facts["dram_bytes"]
    shown = penstock("node-status", "--socket", node.path)
    assert shown.returncode == 0
    for word in ("tiny", "one, two", f"unix://{node.path}", "16.0 MiB"):
        assert word in shown.stdout
    assert one.tiers.close()
    assert two.tiers.close()
    code, said = node.end()
    assert code == 0
    assert "stopping: finishing writes" in said
    assert said.endswith("penstock: stopped\n")
    assert not node.path.exists()


def test_a_node_on_the_same_folder_refills_its_dram_from_disk(start: Start, tmp_path: Path) -> None:
    arguments = ("--disk-path", tmp_path / "kv", "--disk-size", "0.0625", "--metrics-port", "0")
    node = start(*arguments)
    client = Device(node.path)
    keys = client.keys(1, 20)
    assert client.save(keys)
    assert node.end()[0] == 0  # with the client running
    node = start(*arguments)

    # The client attaches again by itself; the node reads its index in the background.
    def is_found() -> bool:
        client.tiers.step()
        return client.tiers.match(keys).num_blocks == 20

    wait_until(is_found, "blocks on disk are not found")
    assert client.load(keys) == 20
    hop = {"model_name": "tiny", "source": "disk", "target": "host", "direction": "load"}
    wait_until(lambda: node.metric("penstock_blocks_total", **hop) == 20, "not counted")
    assert client.load(keys) == 20
    assert node.metric("penstock_blocks_total", **hop) == 20  # the second time from DRAM
    assert client.tiers.close()


def test_the_socket_of_a_node_that_was_killed_is_replaced(start: Start) -> None:
    node = start()
    node.end(signal.SIGKILL)
    assert node.path.exists()
    node = start()
    assert node.status()["models"] == []


def test_a_second_node_at_the_same_socket_is_refused(start: Start, tmp_path: Path) -> None:
    node = start()
    done = penstock("node", "--socket", node.path, "--set", "host.size=16MiB")
    assert done.returncode == 2
    assert f"another node is listening at {node.path}" in done.stderr
    assert "--socket" in done.stderr
    assert node.status()["num_clients"] == 0


@pytest.mark.parametrize("with_group", [False, True])
def test_only_the_user_or_the_group_may_connect(start: Start, with_group: bool) -> None:
    group = grp.getgrgid(os.getgroups()[-1] if os.getgroups() else os.getgid())
    node = start(*(("--group", group.gr_name) if with_group else ()))
    status = os.stat(node.path)
    assert stat.S_IMODE(status.st_mode) == (0o660 if with_group else 0o600)
    if with_group:
        assert status.st_gid == group.gr_gid


def test_a_second_signal_stops_at_once(start: Start) -> None:
    node = start()
    # Both are pending when it continues.
    code, said = node.end(signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT)
    assert code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "stopped at once" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--group", "no-such-group"], "--group is 'no-such-group'"),
        (["--kv-offloading-size", "1000000"], "expected at most the machine's memory"),
        (["--kv-offloading-size", "0"], "--kv-offloading-size is 0"),
        (["--set", "host.size=1MiB"], "a node needs at least"),
        (["--disk-size", "1"], "--disk-size is given without --disk-path"),
        (["--socket", ""], "--socket is empty"),
        (["--socket", "unix://relative"], "expected unix:// and an absolute path"),
        (["--socket", "/" + "long/" * 30 + "s"], "expected at most 107"),
        (["--socket", "/proc/penstock/node.sock"], "cannot listen at /proc/penstock/node.sock"),
        (["--metrics-port", "0", "--metrics-host", "no.invalid"], "has no address"),
        (["--set", "node.model_floor=0.5", "--set", "node.model_cap=0.2"], "node.model_floor"),
    ],
    ids=lambda value: value[0][2:] + value[1][:8] if isinstance(value, list) else "",
)
def test_wrong_input_is_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    given = ["--socket", str(tmp_path / "s"), "--set", "host.size=16MiB", *arguments]
    if "--kv-offloading-size" in arguments:
        given = [each for each in given if each not in ("--set", "host.size=16MiB")]
    done = penstock("node", *given)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    done = penstock("node", "--socket", file, "--set", "host.size=16MiB")
    assert done.returncode == 2
    assert "exists and is not a socket" in done.stderr
    assert file.read_text() == "mine"


def test_status_without_a_node_says_how_to_start_one(tmp_path: Path) -> None:
    done = penstock("node-status", "--socket", tmp_path / "s")
    assert done.returncode == 2
    assert "no node is listening" in done.stderr
    assert "penstock node" in done.stderr


def test_status_of_a_server_that_is_not_a_node(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        command = [sys.executable, "-m", "penstock", "node-status", "--socket", str(path)]
        asking = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        connection, _ = other.accept()
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()
        _, said = asking.communicate(timeout=60)
    assert asking.returncode == 2
    assert f"the node at {path} gives no description" in said


def test_metrics_and_health_over_http(start: Start) -> None:
    node = start("--metrics-port", "0")
    base = node.facts["metrics_url"].removesuffix("/metrics")

    def ask(method: str, place: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.request(method, base + place, headers=headers, timeout=TIMEOUT_SECONDS)

    assert ask("GET", "/health").text == "ok\n"
    assert ask("HEAD", "/metrics").status_code == 200
    assert ask("GET", "/").status_code == 404
    assert ask("GET", "/metrics", {"Host": "evil.example"}).status_code == 403
    for reason in ("attach", "request", "full", "broken"):  # there before the first one
        assert ("penstock_node_refused_clients_total", (("reason", reason),)) in node.metrics()

    client = Device(node.path, name="one")
    assert client.save(client.keys(1, 4))
    wait_until(lambda: node.metric("penstock_node_clients", model_name="tiny") == 1, "no client")
    assert node.metric("penstock_used_blocks", model_name="tiny", tier="host") == 4
    owned = node.metric("penstock_node_model_bytes", model_name="tiny")
    assert owned + node.metric("penstock_node_free_bytes") == 16 << 20
    wait_until(
        lambda: node.metric("penstock_node_prepared_bytes") == 16 << 20, "DRAM is not allocated"
    )

    stranger = connect(node.path)
    stranger.send("hello", {"protocol": 999})
    stranger.flush()
    assert wait_for_frame(stranger, 10).kind == "refused"
    stranger.close()
    refused = "penstock_node_refused_clients_total"
    wait_until(lambda: node.metric(refused, reason="attach") == 1, "not counted")

    assert client.tiers.close()
    wait_until(lambda: node.metric("penstock_node_clients", model_name="tiny") == 0, "still there")
    assert node.metric("penstock_node_lost_clients_total") == 0


def test_a_client_that_is_killed_is_counted(start: Start) -> None:
    node = start("--metrics-port", "0")
    code = (
        "import sys, time; from pathlib import Path; from tests.node.nodes import Device\n"
        "from penstock.node import line; line.ANSWER_SECONDS = 60\n"
        "client = Device(Path(sys.argv[1])); assert client.save(client.keys(1, 4))\n"
        "print(1, flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(node.path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"1\n"
    child.kill()
    child.communicate()
    wait_until(lambda: node.metric("penstock_node_lost_clients_total") == 1, "not counted")
    (model,) = node.status()["models"]
    assert model["clients"] == []
    other = Device(node.path)
    assert other.load(other.keys(1, 4)) == 4
    assert other.tiers.close()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "s"
        done = penstock(
            "node", "--socket", path, "--set", "host.size=16MiB", "--metrics-port", port
        )
    assert done.returncode == 2
    assert "another process listens there" in done.stderr
    assert not path.exists()


def test_the_socket_may_come_from_the_settings_of_the_engines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.sock"
    node = NodeProcess(PENSTOCK_NODE_URL=f"unix://{path}")
    try:
        assert node.path == path
        done = penstock("node-status", "--json", PENSTOCK_NODE_URL=f"unix://{path}")
        assert done.returncode == 0, done.stderr
    finally:
        node.end()


def test_the_commands_of_the_documentation(tmp_path: Path) -> None:
    """Those of the page, the README and the systemd unit, with paths and sizes of this machine."""
    pages = [ROOT / "docs" / "node.md", ROOT / "README.md", ROOT / "deploy/penstock-node.service"]
    text = "\n".join(page.read_text() for page in pages)
    pattern = r"^(?:ExecStart=\S*/)?penstock (node(?:-status)? .*?)(?:#.*)?$"
    commands = re.findall(pattern, text, re.M)
    assert len(commands) >= 4
    settings = tmp_path / "node.toml"
    settings.write_text('[host]\nsize = "16MiB"\n')
    places = {
        "/run/penstock/node.sock": str(tmp_path / "s"),
        "/var/cache/penstock": str(tmp_path / "kv"),
        "/etc/penstock/node.toml": str(settings),
        "--kv-offloading-size 64": "--kv-offloading-size 0.0625",
        "--disk-size 500": "--disk-size 0.0625",
        "--group penstock": f"--group {os.getgid()}",
        "--metrics-port 9600": "--metrics-port 0",
    }
    for given in commands:
        command = given
        for there, here in places.items():
            command = command.replace(there, here)
        words = command.split()
        if "--socket" not in words:
            words += ["--socket", str(tmp_path / "s")]
        if words[0] == "node-status":
            done = penstock(*words)
            assert "no node is listening" in done.stderr, given
            continue
        node = NodeProcess(*words[1:], dram=None)
        assert node.status()["models"] == []
        assert node.end()[0] == 0, given


def test_which_socket_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Config(node=NodeConfig(url="unix:///run/a.sock"))
    assert find_socket(None, settings) == Path("/run/a.sock")
    assert find_socket("/run/b.sock", settings) == Path("/run/b.sock")
    assert find_socket("unix:///run/b.sock", settings) == Path("/run/b.sock")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert find_socket(None, Config()) == Path("/run/penstock/node.sock")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert find_socket(None, Config()) == Path("/run/user/1000/penstock/node.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigError, match="add --socket"):
        find_socket(None, Config())
