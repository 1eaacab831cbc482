"""Who may reach a Ray cluster: the token that a user holds, and whether a cluster asks for one."""

from __future__ import annotations

import importlib
import os
import stat
from pathlib import Path

from distill_rl.errors import ConfigError

_ANSWER_S = 3.0
_PROTOCOL = "ray.core.generated.gcs_service"
_WITHOUT = "or set RAY_AUTH_MODE=disabled for a cluster that asks for none"


def required() -> bool:
    """Whether tokens are in use, which is the default (see this package's `__init__`)."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def require_token() -> None:
    """
    Raises:
        ConfigError: tokens are in use, and there is none where Ray looks for it, or others can read its file.
    """
    if required() and not os.environ.get("RAY_AUTH_TOKEN"):
        _token()


def require_entry(gcs: str) -> None:
    """That a cluster takes this user's token, and asks for one: Ray itself tries a wrong token for minutes, and joins
    a cluster that runs code for everybody without a word.

    Args:
        gcs: host:port of the cluster's control service.

    Raises:
        ConfigError: it does not, or, where tokens are in use, that cannot be asked for want of a library.
    """
    if required():
        _require_means()
    if _lets_in(gcs, _token() if required() else None) is False:
        known = "give the token that it was started with, as RAY_AUTH_TOKEN_PATH"
        remedy = known if required() else f"{known}, and do not set RAY_AUTH_MODE=disabled"
        raise ConfigError(f"the Ray cluster at {gcs}", "must take your token; it refuses it", remedy=remedy)
    if required() and _lets_in(gcs, None):
        raise ConfigError(
            f"the Ray cluster at {gcs}",
            "must ask for a token: it runs code for everybody who reaches it",
            remedy="start it with RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here to join it all the same",
        )


def _token() -> str:
    """The token that Ray would use."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    said = os.environ.get("RAY_AUTH_TOKEN_PATH")
    what = "RAY_AUTH_TOKEN_PATH" if said else "the token of the Ray cluster"
    path = Path(said).expanduser() if said else Path.home() / ".ray" / "auth_token"
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        remedy = f"set RAY_AUTH_TOKEN_PATH to the file of the cluster's token, {_WITHOUT}"
        raise ConfigError(what, "must be a file that you can read", f"{path} ({reason})", remedy) from None
    if mode & 0o077:
        raise ConfigError(what, "only you may read the token", f"{path}, mode {mode:04o}", f"chmod 600 {path}")
    return token


def _require_means() -> None:
    try:
        importlib.import_module("grpc")
        importlib.import_module(f"{_PROTOCOL}_pb2_grpc")
    except ImportError as error:
        rule = "needs grpcio, and a Ray that it fits, to find out whether a cluster asks for a token"
        raise ConfigError("joining a Ray cluster", rule, str(error), f"pip install grpcio, {_WITHOUT}") from None


def _lets_in(gcs: str, token: str | None) -> bool | None:
    """Whether a call with this token, or none, is answered; None where that cannot be found out."""
    try:
        import grpc
        from ray.core.generated.gcs_service_pb2 import CheckAliveRequest  # type: ignore[attr-defined]
        from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
    except ImportError:
        return None
    metadata = None if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(gcs) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=_ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            return False if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return True
