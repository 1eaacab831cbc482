"""What is found out about an address before Ray's client sees it; the real service is in tests/service."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from distill_rl.errors import ConfigError
from distill_rl.service.client import Service


class Open(BaseHTTPRequestHandler):
    """Answers everybody, as Ray's dashboard does without authentication."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *ignored: object) -> None:
        pass


@pytest.fixture
def open_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Open)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def token(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("a token")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    return path


def test_a_cluster_that_takes_jobs_from_everybody_is_refused(open_server):
    with pytest.raises(ConfigError, match=r"must ask for a token.*RAY_AUTH_MODE=disabled"):
        Service(open_server)


def test_a_token_that_others_can_read_is_refused_before_anything_is_sent(open_server, token):
    token.chmod(0o640)
    with pytest.raises(ConfigError, match=r"only you may read the token.*mode 0640; chmod 600"):
        Service(open_server)


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "ray://x:1", "http://", "http://me:pw@x:1", "http://x:1/path", "http://x:x"])  # fmt: skip
def test_an_address_that_is_none_is_named(address):
    with pytest.raises(ConfigError, match=r"--address: must"):
        Service(address)


def test_nobody_there_is_told_with_the_way_to_a_tunnel():
    with pytest.raises(ConfigError, match=r"no Ray dashboard answers there.*ssh -N -L 8265:127.0.0.1:8265"):
        Service("http://127.0.0.1:1")


def test_the_environment_names_the_cluster_where_nothing_else_does(monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:2")
    with pytest.raises(ConfigError, match=r"--address http://127.0.0.1:2: no Ray dashboard"):
        Service()
