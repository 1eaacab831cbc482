"""The Jobs API of one cluster, with a deadline on every request and one-line errors."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distill_rl.errors import ConfigError, WorkerError
from distill_rl.system.environment import install_extra
from distill_rl.workers.cluster import access

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_CONNECT_S = 5.0
_REQUEST_S = 60.0
_NO_CLUSTER = """submit, status, logs and stop need a running Ray cluster with its dashboard: start one (docs/operations.md,
    Service), or reach the one of another machine by ssh -N -L 8265:127.0.0.1:8265 HEAD; `distill-rl train` needs none, and
    the log of its run is in the run directory"""


class Service:
    """The requests that the commands send to a cluster."""

    def __init__(self, address: str | None = None):
        """Connects to a cluster, after checking that it answers and requires a token.

        Sets RAY_API_SERVER_ADDRESS in this process's environment.

        Args:
            address: `http://HOST:PORT` of the cluster's dashboard; None: $RAY_API_SERVER_ADDRESS, or DEFAULT_ADDRESS.

        Raises:
            ConfigError: a malformed address, no cluster there, a missing or wrong token, a cluster that does not
                require a token (unless authentication is disabled here), or Ray's client is not installed.
            WorkerError: the cluster refuses the request.
        """
        self.address = _checked(address or os.environ.get(_ADDRESS) or DEFAULT_ADDRESS)
        _require_answer(self.address)  # first: without a cluster there is no token to ask for
        access.require_token()
        _require_locked(self.address)
        os.environ[_ADDRESS] = self.address  # otherwise Ray prefers RAY_ADDRESS to its argument
        with self._as_our_errors():
            self._client = _client_class()(self.address)

    def submit(self, entrypoint: str, submission_id: str, **details: Any) -> None:
        """Submits a job and returns without waiting for its start.

        Args:
            entrypoint: shell command of the job.
            details: further arguments of Ray's `submit_job`, such as `metadata` and `runtime_env`.

        Raises:
            ConfigError: a job with this id exists already, or the cluster cannot be reached or rejects the token.
            WorkerError: the cluster refuses the request.
        """
        with self._as_our_errors():
            try:
                self._client.submit_job(entrypoint=entrypoint, submission_id=submission_id, **details)
            except RuntimeError as error:
                if "already exists" not in str(error):
                    raise
                rule, remedy = "was just submitted by someone else", "look at the status"
                raise ConfigError(f"job {submission_id}", rule, remedy=remedy) from None

    def jobs(self) -> list[JobDetails]:
        """All jobs submitted through the cluster's Jobs API, in any state, those of other programs included.

        Raises:
            ConfigError: the cluster cannot be reached, or rejects the token.
            WorkerError: it cannot carry out the request.
        """
        with self._as_our_errors():
            return [job for job in self._client.list_jobs() if job.submission_id]

    def job(self, submission_id: str) -> JobDetails:
        """What Ray knows of a job.

        Raises:
            ConfigError: the cluster cannot be reached, or rejects the token.
            WorkerError: it cannot carry out the request, for instance because it has no such job.
        """
        with self._as_our_errors():
            return self._client.get_job_info(submission_id)

    def logs(self, submission_id: str) -> str:
        """Everything that a job has printed so far.

        Raises:
            ConfigError: the cluster cannot be reached, or rejects the token.
            WorkerError: it cannot carry out the request, for instance because it has no such job.
        """
        with self._as_our_errors():
            return self._client.get_job_logs(submission_id)

    def stop(self, submission_id: str) -> None:
        """Asks a job to end, with SIGTERM, and returns without waiting for its end.

        Raises:
            ConfigError: the cluster cannot be reached, or rejects the token.
            WorkerError: it cannot carry out the request, for instance because it has no such job.
        """
        with self._as_our_errors():
            self._client.stop_job(submission_id)

    @contextmanager
    def _as_our_errors(self) -> Iterator[None]:
        """Turns errors of the network, the authentication and the cluster inside the block into this package's."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            remedy = "set RAY_AUTH_TOKEN_PATH to the token that the cluster was started with"
            raise ConfigError(f"the Ray cluster at {self.address}", "rejects your token", remedy=remedy) from error
        except (ConnectionError, requests.RequestException) as error:
            raise _unreachable(self.address, type(error).__name__) from error
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise WorkerError(f"the Ray cluster at {self.address}", "must carry out the request", reason) from error


def _client_class() -> Any:
    """The class of Ray's client of the Jobs API, with a timeout on every request and without redirects."""
    try:
        import pydantic  # noqa: F401  (without it Ray's client has no JobDetails)
        import requests  # noqa: F401
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        rule, remedy = "needs the extra `dashboard`", install_extra("dashboard")
        raise ConfigError("Ray's Jobs API", rule, str(error), remedy) from None
    logging.getLogger("ray").setLevel(logging.ERROR)

    class OurJobsClient(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=_REQUEST_S, allow_redirects=False, **more)

    return OurJobsClient


def _checked(address: str) -> str:
    """The address of a dashboard as `SCHEME://HOST:PORT`, with the scheme's default port if none is given."""
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
    """Checks that something accepts connections at an address with a port, within 5 seconds."""
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=_CONNECT_S).close()  # type: ignore[arg-type]
    except OSError as error:
        raise _unreachable(address, str(error)) from None


def _require_locked(address: str) -> None:
    """Refuses a cluster that runs jobs without a token, unless the user has disabled authentication."""
    if not access.required():
        return
    import requests

    try:
        answer = requests.get(f"{address}/api/jobs/", timeout=_REQUEST_S, allow_redirects=False)
    except requests.RequestException as error:
        raise _unreachable(address, type(error).__name__) from None
    if answer.ok:
        rule = "must require a token: it runs jobs of anyone who can reach it"
        remedy = "start it with RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here to use it anyway"
        raise ConfigError(f"the Ray cluster at {address}", rule, remedy=remedy)


def _unreachable(address: str, reason: str) -> ConfigError:
    return ConfigError(f"--address {address}", "no Ray cluster answers there", reason, _NO_CLUSTER)
