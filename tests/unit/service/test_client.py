"""Checks of an address before Ray's client uses it; tests/service tests the real service."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from distill_rl.errors import ConfigError
from distill_rl.service.client import Service


class Open(BaseHTTPRequestHandler):
    """Answers every request, as Ray's dashboard does without authentication."""

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


def test_cluster_without_authentication_is_rejected(open_server):
    with pytest.raises(ConfigError, match=r"must require a token.*RAY_AUTH_MODE=disabled"):
        Service(open_server)


def test_token_readable_by_others_is_rejected_before_any_request(open_server, token):
    token.chmod(0o640)
    with pytest.raises(ConfigError, match=r"only you may read the token.*mode 0640; chmod 600"):
        Service(open_server)


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "ray://x:1", "http://", "http://me:pw@x:1", "http://x:1/path", "http://x:x"])  # fmt: skip
def test_invalid_address_is_reported(address):
    with pytest.raises(ConfigError, match=r"--address: must"):
        Service(address)


def test_unreachable_address_suggests_a_tunnel():
    with pytest.raises(ConfigError, match=r"no Ray cluster answers there.*ssh -N -L 8265:127.0.0.1:8265"):
        Service("http://127.0.0.1:1")


def test_no_cluster_is_said_before_a_missing_token(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no Ray cluster answers there.*`distill-rl train` needs none"):
        Service("http://127.0.0.1:1")


def test_address_defaults_to_the_environment_variable(monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:2")
    with pytest.raises(ConfigError, match=r"--address http://127.0.0.1:2: no Ray cluster"):
        Service()
