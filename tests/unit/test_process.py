"""A server process is watched closely and leaves nothing behind; stand-ins take the place of the server."""

import os
import socket
import sys
import textwrap
import time

import psutil
import pytest

from sglang_adaptive.launch import process
from sglang_adaptive.launch.process import ServerFailed, ServerProcess, free_port


def stand_in(tmp_path, body: str) -> ServerProcess:
    """A server whose Python runs ``body`` instead of SGLang; ``argv`` there is the server's."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n" + textwrap.dedent(body))
    script.chmod(0o755)
    return ServerProcess(["--model-path", "m"], tmp_path / "log" / "server.log", python=str(script))


SERVING = """
import http.server, socketserver, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session={detached})
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
socketserver.TCPServer(("127.0.0.1", port), Handler).serve_forever()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.mark.parametrize("detached", [False, True])
def test_stop_ends_every_descendant(tmp_path, monkeypatch, detached):
    monkeypatch.setattr(process, "STOP_SECONDS", 1.0)
    with stand_in(tmp_path, SERVING.format(child=STUBBORN, detached=detached)) as server:
        assert server.wait_ready(30) < 30
        processes = server.processes()
        assert len(processes) == 2
    assert not any(psutil.pid_exists(each.pid) and each.status() != "zombie" for each in processes)


def test_children_of_a_dead_server_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "STOP_SECONDS", 1.0)
    body = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])"
    with stand_in(tmp_path, body) as server:
        assert server.wait_exit(30) == 0
        (orphan,) = server.processes()
    assert not (psutil.pid_exists(orphan.pid) and orphan.status() != "zombie")


def test_death_is_noticed_with_its_reason(tmp_path):
    body = """
    print("[2026-01-01 00:00:00] loading")
    raise SystemError("the weights are missing")
    """
    with stand_in(tmp_path, body) as server, pytest.raises(ServerFailed) as failure:
        server.wait_ready(60)
    first, *rest = str(failure.value).splitlines()
    assert first == "the server ended with exit status 1: SystemError: the weights are missing"
    assert any("loading" in line for line in rest)


def test_a_server_that_never_serves_is_given_up(tmp_path):
    beats = []
    with stand_in(tmp_path, "import time; time.sleep(600)") as server, pytest.raises(ServerFailed, match="not ready"):
        server.wait_ready(1.2, beats.append)
    assert beats == sorted(beats) and len(beats) >= 2


def test_the_server_is_offline_and_gets_its_environment(tmp_path):
    body = "import os; print(os.environ['HF_HUB_OFFLINE'], os.environ['MARK'])"
    server = stand_in(tmp_path, body)
    server._environment["MARK"] = "seen"
    with server:
        server.wait_exit(30)
    assert server.log_text().split() == ["1", "seen"]
    assert "MARK" not in os.environ


def test_a_free_port_can_be_listened_on_and_is_not_one_that_connections_get():
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 15, "two servers that start together would often get the same"
    with socket.socket() as listener, socket.socket() as connection:
        listener.bind(("127.0.0.1", ports[0]))
        listener.listen()
        assert listener.getsockname()[1] == ports[0]
        connection.connect(listener.getsockname())
        assert max(ports) < connection.getsockname()[1]


def test_a_port_that_is_taken_meanwhile_ends_the_wait(tmp_path):
    line = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"
    with stand_in(tmp_path, f"import time; print({line!r}, flush=True); time.sleep(60)") as server:
        begin = time.monotonic()
        with pytest.raises(ServerFailed, match=f"another process has taken port {server.port}"):
            server.wait_ready(50)
        assert time.monotonic() - begin < 40
