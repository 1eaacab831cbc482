"""Access to a Ray cluster: the user's token, and whether a cluster asks for one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from distill_rl.errors import ConfigError

_ANSWER_S = 3.0
_OR_DISABLE = "or set RAY_AUTH_MODE=disabled for a cluster that asks for none"


def required() -> bool:
    """Whether tokens are in use, which is the default (set in `distill_rl/workers/__init__.py`)."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def require_token() -> None:
    """Checks that the user has a token for Ray, if tokens are in use. A set RAY_AUTH_TOKEN is taken as it is.

    Raises:
        ConfigError: there is no readable token file, or other users have permissions on it.
    """
    if required() and not os.environ.get("RAY_AUTH_TOKEN"):
        _token()


def require_entry(gcs: str) -> None:
    """Checks that a cluster accepts this user's token, and that it asks for one at all.

    Ray itself retries a wrong token for minutes, and joins without warning a cluster that runs code for anybody. A
    cluster that does not answer within seconds passes, because then nothing can be determined. Without tokens, only a
    refusal is an error.

    Args:
        gcs: host:port of the cluster's control service.

    Raises:
        ConfigError: the cluster refuses the token; tokens are in use, but the cluster asks for none; or tokens are in
            use and a library that is needed to find out is missing.
    """
    token = _token() if required() else None
    try:
        accepted = _accepts(gcs, token)
    except ImportError as error:
        if token is None:
            return
        rule = "needs grpcio, in a version that fits Ray, to find out whether a cluster asks for a token"
        raise ConfigError("joining a Ray cluster", rule, str(error), f"pip install grpcio, {_OR_DISABLE}") from None
    if accepted is False:
        remedy = "give the token that it was started with, as RAY_AUTH_TOKEN_PATH"
        if token is None:
            remedy += ", and do not set RAY_AUTH_MODE=disabled"
        raise ConfigError(f"the Ray cluster at {gcs}", "must take your token; it refuses it", remedy=remedy)
    if token is not None and _accepts(gcs, None):
        rule = "must ask for a token: it runs code for anybody who can reach it"
        remedy = "start it with RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here to join it all the same"
        raise ConfigError(f"the Ray cluster at {gcs}", rule, remedy=remedy)


def _token() -> str:
    """Returns the token that Ray would use: RAY_AUTH_TOKEN, or the content of a file."""
    # The file is RAY_AUTH_TOKEN_PATH, or else `~/.ray/auth_token`.
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    configured = os.environ.get("RAY_AUTH_TOKEN_PATH")
    what = "RAY_AUTH_TOKEN_PATH" if configured else "the token of the Ray cluster"
    path = Path(configured).expanduser() if configured else Path.home() / ".ray" / "auth_token"
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        remedy = f"set RAY_AUTH_TOKEN_PATH to the file of the cluster's token, {_OR_DISABLE}"
        raise ConfigError(what, "must be a file that you can read", f"{path} ({reason})", remedy) from None
    if mode & 0o077:
        raise ConfigError(what, "only you may read the token", f"{path}, mode {mode:04o}", f"chmod 600 {path}")
    return token


def _accepts(gcs: str, token: str | None) -> bool | None:
    """Whether the cluster answers a call with this token (or without one); None if that cannot be determined."""
    import grpc
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest  # type: ignore[attr-defined]
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(gcs) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=_ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            return False if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return True
