"""The token of a server, which the driver reads from its environment and hands to the teacher's actors."""

from __future__ import annotations

import os

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import ConfigError


def token_of(teacher: TeacherConfig) -> str | None:
    """The token of a teacher's servers from the environment; None if there is none.

    Raises:
        ConfigError: the variable that `token_env` names is not set, or holds what cannot be sent.
    """
    if teacher.token_env is None:
        return None
    token = os.environ.get(teacher.token_env, "").strip()
    what = f"teacher {teacher.name}"
    if not token:
        raise ConfigError(what, f"needs its server's token in {teacher.token_env} (token_env)", "nothing", "export it")
    if not (token.isascii() and token.isprintable() and " " not in token):
        rule = f"the token in {teacher.token_env} must be printable characters without spaces"
        raise ConfigError(what, rule, "others", "export it again")
    return token
