"""The Jobs API of one cluster, with deadlines on every request and errors of one line."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distill_rl.errors import ConfigError, WorkerError
from distill_rl.workers.cluster import access

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_CONNECT_S = 5.0
_REQUEST_S = 60.0
_EXTRA = "pip install 'distill_rl[dashboard]'"
_TUNNEL = (
    "the head needs Ray's dashboard (the extra `dashboard`); from another machine: ssh -N -L 8265:127.0.0.1:8265 HEAD"
)


class Service:
    """What the commands ask of a cluster.

    Raises:
        ConfigError: no cluster at the address, no token or a wrong one, or a cluster that lets everybody in.
    """

    def __init__(self, address: str | None = None):
        self.address = _checked(address or os.environ.get(_ADDRESS) or DEFAULT_ADDRESS)
        access.require_token()
        _require_answer(self.address)
        _require_locked(self.address)
        os.environ[_ADDRESS] = self.address  # else Ray prefers RAY_ADDRESS to what it is given
        with self._told():
            self._client = _client_class()(self.address)

    def submit(self, entrypoint: str, submission_id: str, **details: Any) -> None:
        """
        Raises:
            ConfigError: a job of this id is there already.
        """
        with self._told():
            try:
                self._client.submit_job(entrypoint=entrypoint, submission_id=submission_id, **details)
            except RuntimeError as error:
                if "already exists" not in str(error):
                    raise
                raise ConfigError(
                    f"job {submission_id}", "was submitted by somebody else just now", remedy="look at the status"
                ) from None

    def jobs(self) -> list[JobDetails]:
        with self._told():
            return [job for job in self._client.list_jobs() if job.submission_id]

    def job(self, submission_id: str) -> JobDetails:
        with self._told():
            return self._client.get_job_info(submission_id)

    def logs(self, submission_id: str) -> str:
        """All that a job has written so far."""
        with self._told():
            return self._client.get_job_logs(submission_id)

    def stop(self, submission_id: str) -> None:
        """Asks a job to end, by SIGTERM, and returns at once."""
        with self._told():
            self._client.stop_job(submission_id)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the network, of authentication and of the cluster as lines of ours."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            remedy = "give the token that the cluster was started with, as RAY_AUTH_TOKEN_PATH"
            raise ConfigError(
                f"the Ray cluster at {self.address}", "must take your token; it refuses it", remedy=remedy
            ) from error
        except (ConnectionError, requests.RequestException) as error:
            raise _unreachable(self.address, type(error).__name__) from error
        except RuntimeError as error:
            text = str(error).strip()
            raise WorkerError(
                f"the Ray cluster at {self.address}", "must do what it is asked", text.splitlines()[-1]
            ) from error


def _client_class() -> Any:
    try:
        import pydantic  # noqa: F401  (without it Ray's client has no JobDetails)
        import requests  # noqa: F401
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError("Ray's Jobs API", "needs the extra `dashboard`", str(error), _EXTRA) from None
    logging.getLogger("ray").setLevel(logging.ERROR)

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=_REQUEST_S, allow_redirects=False, **more)

    return Client


def _checked(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.path.strip("/"):
        raise ConfigError("--address", "must be http://HOST:PORT of the cluster's dashboard", address, DEFAULT_ADDRESS)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ConfigError("--address", "must have a port from 1 to 65535", address, DEFAULT_ADDRESS) from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _require_answer(address: str) -> None:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=_CONNECT_S).close()  # type: ignore[arg-type]
    except OSError as error:
        raise _unreachable(address, str(error)) from None


def _require_locked(address: str) -> None:
    """Refuses a cluster that takes jobs from everybody who reaches it, unless the user wants none of tokens."""
    if not access.required():
        return
    import requests

    try:
        answer = requests.get(f"{address}/api/jobs/", timeout=_REQUEST_S, allow_redirects=False)
    except requests.RequestException as error:
        raise _unreachable(address, type(error).__name__) from None
    if answer.ok:
        raise ConfigError(
            f"the Ray cluster at {address}",
            "must ask for a token: it runs jobs of everybody who reaches it",
            remedy="start it with RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here to use it all the same",
        )


def _unreachable(address: str, reason: str) -> ConfigError:
    return ConfigError(f"--address {address}", "no Ray dashboard answers there", reason, _TUNNEL)
