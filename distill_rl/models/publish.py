"""Uploads an export to the Hugging Face hub, in one commit.

    open_repository     login, name, rights, visibility; before any work is done for the upload
    push                one commit with the files of an export, and without weights of an earlier one

The login is that of the hub's own tools, the variable HF_TOKEN or `hf auth login`. The token is never an argument here, and
is in no message. Time-outs and retries of the upload are those of huggingface_hub.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError, DistillError, first_line
from distill_rl.models.files.facts import in_time
from distill_rl.models.lora import folder as lora

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ANSWER_S = 60.0
"""A hub that has not answered a question within this time counts as unreachable."""
_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json"),
    *(f"{lora.FOLDER}/adapter_model.safetensors", f"{lora.FOLDER}/adapter_config.json"),
)
"""What must not stay in a repository beside another export."""
_FILES = (
    *("README.md", "LICENSE*", "config.json", "generation_config.json"),
    *("tokenizer*.json", "tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *_WEIGHTS,
)
"""Names of all files that an export can have."""


class PublishError(DistillError):
    """The hub refused the upload, or it broke off."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository on the hub that this login may write to."""

    name: str
    """As `OWNER/NAME`."""
    address: str
    private: bool
    files: frozenset[str] = frozenset()
    """What it holds so far."""


def open_repository(name: str, *, public: bool) -> Repository:
    """Finds a repository for a model, or creates it.

    Args:
        name: `OWNER/NAME`.
        public: whether everybody may read it.

    Raises:
        ConfigError: not such a name, no login or one that may not write there, a repository with the other visibility, or
            no answer from the hub.
    """
    from huggingface_hub import HfApi, get_token

    _require_name(name)
    if get_token() is None:
        remedy = "run `hf auth login`, or set HF_TOKEN"
        raise ConfigError(f"--push {name}", "needs a login of the Hugging Face hub", "none", remedy)
    api = HfApi()
    _require_rights(name, _ask(name, api.whoami))
    found = _existing(api, name)
    if found is None:
        _ask(name, lambda: api.create_repo(name, private=not public, exist_ok=True))
        return Repository(name, f"{api.endpoint}/{name}", private=not public)
    if bool(found.private) == public:
        is_so, remedy = ("private", "leave out --public") if found.private else ("public", "add --public")
        rule = f"the repository exists and is {is_so}"
        raise ConfigError(f"--push {name}", rule, None, f"{remedy}, or change its visibility on the hub")
    files = frozenset(file.rfilename for file in found.siblings or ())
    return Repository(name, f"{api.endpoint}/{name}", bool(found.private), files)


def push(folder: Path, repository: Repository, *, message: str) -> str:
    """Uploads an export in one commit, which also removes weights in the repository that are not of this export.

    Those would be loaded in place of the new ones, or with them, where the export is in other files than the one before. Only
    files that an export consists of (`export_files`) are uploaded.

    Args:
        folder: as `export_model` wrote it.
        message: first line of the commit.

    Returns:
        The id of the commit.

    Raises:
        PublishError: the hub refused it, or the upload broke off; the repository is then as it was.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    names = export_files(folder)
    stale = sorted(name for name in repository.files - set(names) if _is_any(name, _WEIGHTS))
    operations: list[Any] = [CommitOperationDelete(path_in_repo=name) for name in stale]
    operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names]
    try:
        return HfApi().create_commit(repository.name, operations, commit_message=message).oid
    except Exception as error:  # of the hub, its HTTP client, its transfer library, or the disk
        remedy = f"repeat the command; {folder} is complete"
        raise PublishError(f"upload to {repository.address}", "must succeed", _reason(error), remedy) from error


def export_files(folder: Path) -> list[str]:
    """The files in a folder that belong to an export, by relative path and in order; without links and anything else."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    inside = (path for path in found if path.resolve().is_relative_to(folder.resolve()))
    return sorted(name for path in inside if _is_any(name := path.relative_to(folder).as_posix(), _FILES))


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern that has as many folders."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _require_name(name: str) -> None:
    """Raises a ConfigError unless `name` is OWNER/NAME by the hub's rules."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
        valid = name.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        rule = "must be OWNER/NAME, of letters, digits, '-', '_' and '.'"
        raise ConfigError("--push", rule, name, "for example --push me/my-student")


def _require_rights(name: str, who: dict[str, Any]) -> None:
    """Checks that a login may write to a repository.

    Args:
        who: the hub's answer about the login.

    Raises:
        ConfigError: its token may only read, or the owner is neither the user nor an organisation of theirs.
    """
    user, owner = str(who.get("name")), name.partition("/")[0]
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        remedy = "make one that may write, and log in with it (`hf auth login`)"
        raise ConfigError(
            f"--push {name}", f"the token of {user} must be one that may write", "one that may read", remedy
        )
    owners = [user, *(str(organisation.get("name")) for organisation in who.get("orgs") or ())]
    if owner.lower() not in (one.lower() for one in owners):
        rule = f"{user} cannot write to what belongs to {owner}"
        raise ConfigError(f"--push {name}", rule, None, f"push to one of {', '.join(owners)}")


def _existing(api: HfApi, name: str) -> Any:
    """What the hub says of a model; None if there is none of this name that the login can see."""
    from huggingface_hub.errors import RepositoryNotFoundError

    def ask() -> Any:
        try:
            return api.model_info(name)
        except RepositoryNotFoundError:
            return None

    # Boxed, because for `in_time` None is a hub that does not answer.
    return _ask(name, lambda: [ask()])[0]


def _ask(name: str, request: Callable[[], Any]) -> Any:
    """Returns the hub's answer.

    Raises:
        ConfigError: it refuses, or does not answer within ANSWER_S.
    """
    answer = in_time(request, ANSWER_S)
    if answer is None:
        raise ConfigError(f"--push {name}", "the hub must answer", f"nothing within {ANSWER_S:g} s", "try again")
    if isinstance(answer, Exception):
        status = getattr(getattr(answer, "response", None), "status_code", None)
        if status == 401:
            remedy = "log in again (`hf auth login`), or set HF_TOKEN to a valid token"
            raise ConfigError(f"--push {name}", "the hub does not know this login", None, remedy) from answer
        if status == 403:
            remedy = "take a token with write access to it"
            raise ConfigError(f"--push {name}", "this login may not write there", None, remedy) from answer
        rule = "the hub must answer" if status is None else "the hub must accept it"
        raise ConfigError(f"--push {name}", rule, _reason(answer), _reachable()) from answer
    return answer


def _reachable() -> str:
    """What to do about a hub that does not answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "unset HF_HUB_OFFLINE"
    return f"check the network, or push from a machine that reaches {constants.ENDPOINT}"


def _reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {first_line(error)}"
