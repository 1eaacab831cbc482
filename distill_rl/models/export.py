"""Writes a sharded model as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads, and uploads it."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distill_rl.errors import ConfigError, DistillError, first_line
from distill_rl.models import adapters
from distill_rl.models.adapters import Adapter, gather, injected_in
from distill_rl.models.files import holds_several, in_time, read_config, resolve
from distill_rl.models.parallelize import reshard, tie_again
from distill_rl.models.weights import Fused, WeightFiles, kept_in_fp32, restore, skeleton, tensors_in_files
from distill_rl.parallel.shards import gather_to_first
from distill_rl.system.files import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ANSWER_S = 60.0
"""A hub that has not answered a question within this time counts as unreachable."""
_PUSHED_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json"),
    *(f"{adapters.FOLDER}/adapter_model.safetensors", f"{adapters.FOLDER}/adapter_config.json"),
)
"""What must not stay in a repository beside another export."""
_PUSHED_FILES = (
    *("README.md", "LICENSE*", "config.json", "generation_config.json"),
    *("tokenizer*.json", "tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *_PUSHED_WEIGHTS,
)
"""Names of all files that an export can have."""

MAX_FILE_BYTES = 5 * 10**9


class ExportError(DistillError):
    """The folder cannot be written. Raised only on the rank that writes."""


def export_model(
    model: PreTrainedModel,
    *,
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    card: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes weights, config, generation config (if `source` has one), tokenizer and model card into `out_dir`.

    Collective over the model's ranks. Parameters are gathered one by one, so only rank 0 ever holds all of them. Rank 0
    returns when the complete folder has its final name, replacing an existing one; the others return as soon as they have
    sent their shards. What earlier, broken exports to `out_dir` left beside it is removed.

    Adapters are merged into the weights, which are then read from `source` again and not gathered. The folder `adapter`
    within has them as they are, for PEFT.

    Args:
        source: folder or hub name from which the model was loaded.
        card: text of README.md; None: none is written.
        revision: of a hub model.
        dtype: of the tensors in the files; None: each as in `source`. What the family keeps in fp32 stays as in `source`.
        max_file_bytes: size of a file with weights at most, unless a single tensor is larger.

    Raises:
        ExportError: on rank 0 only, if the folder cannot be written.
    """
    folder = resolve(source, revision, weights=True)
    files = WeightFiles(folder)
    reshard(model)  # a forward without backward may have left weights gathered
    adapter: Adapter | None = None
    if injected_in(model) is None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = _state(model, files, dtype, lambda name, _: gather_to_first(tensors[name]))
    elif (adapter := gather(model)) is None:
        return
    else:
        # Of the weights that were not trained the student may hold rounded or quantised values; the files do not.
        plain, merged = skeleton(read_config(folder), dtype=torch.float32, attention="eager"), adapter.merged
        tie_again(plain)
        state = _state(plain, files, dtype, lambda name, read: merged(name, read()))
    if state is None:
        return
    out_dir = Path(out_dir)
    try:
        with replacing(out_dir) as unfinished:
            _write_config(folder, unfinished, state)
            _write_weights(state, unfinished, max_file_bytes)
            if (folder / "generation_config.json").is_file():
                shutil.copyfile(folder / "generation_config.json", unfinished / "generation_config.json")
            tokenizer.save_pretrained(unfinished)
            if adapter is not None:
                adapters.write_adapter(adapter, unfinished / adapters.FOLDER, base=str(source), revision=revision)
            if card is not None:
                (unfinished / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"export to {out_dir}", "must be writable, with room for the model", str(error)) from error


def _state(
    model: PreTrainedModel,
    files: WeightFiles,
    dtype: torch.dtype | None,
    whole: Callable[[str, Callable[[], Tensor]], Tensor | None],
) -> dict[str, Tensor] | None:
    """All tensors of an export on the CPU, of which `whole` gives one by its name; None if it gives none on this rank."""
    # The second argument of `whole` reads what the files have of the tensor. Each has the name that it has in `files`, and that
    # dtype if `dtype` is None; of a tied tensor's names, the first. Files of a bare inner model become those of the whole.
    state: dict[str, Tensor] = {}
    found = tensors_in_files(model, files)

    def written(name: str, stored: str) -> torch.dtype:
        return files.dtype(stored) if dtype is None or kept_in_fp32(model, name, dtype) else dtype

    for name, (file_name, *_) in found.stored.items():
        tensor = whole(name, partial(files.read, file_name))
        if tensor is not None:
            state[file_name if file_name in found.renamed else name] = tensor.to(written(name, file_name))
    made: dict[tuple[str, Any], dict[str, Fused]] = defaultdict(dict)  # by converter, which may make several tensors
    for name, fused in found.fused.items():
        made[fused.first, fused.converter][name] = fused
    for group in made.values():
        wholes = {name: whole(name, partial(fused.read, model, files.read, ())) for name, fused in group.items()}
        first, fused = next(iter(group.items()))
        as_dtype = written(first, fused.names[0])
        if present := {name: tensor.to(as_dtype) for name, tensor in wholes.items() if tensor is not None}:
            state |= {name: tensor.contiguous() for name, tensor in restore(model, present).items()}
    return state or None


def _write_weights(state: dict[str, Tensor], folder: Path, max_file_bytes: int) -> None:
    """Writes the state dict as safetensors of at most `max_file_bytes` each, with an index file if there are several."""
    # Their mode is that of the config.json, which is there: safetensors lets only the owner read what it writes.
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=max_file_bytes)
    for file_name, names in split.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, folder / file_name, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file_name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_config(source: Path, folder: Path, state: dict[str, Tensor]) -> None:
    """Writes the source's config.json into `folder`, without a reference to code (`auto_map`)."""
    # Of a model with several towers it is the config of the text tower. Its `dtype` becomes that of most of the
    # weights' bytes.
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if holds_several(source):
        config = json.loads(read_config(source).to_json_string())
    config.pop("auto_map", None)
    config.pop("torch_dtype", None)
    sizes: Counter[torch.dtype] = Counter()
    for tensor in state.values():
        sizes[tensor.dtype] += tensor.nbytes
    config["dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# An upload to the Hugging Face hub, in one commit.
#
#     open_repository     login, name, rights, visibility; before any work is done for the upload
#     push                one commit with the files of an export, and without weights of an earlier one
#
# The login is that of the hub's own tools, the variable HF_TOKEN or `hf auth login`. The token is never an argument here, and
# is in no message. Time-outs and retries of the upload are those of huggingface_hub.


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
    from huggingface_hub.errors import RepositoryNotFoundError

    _require_name(name)
    if get_token() is None:
        remedy = "run `hf auth login`, or set HF_TOKEN"
        raise ConfigError(f"--push {name}", "needs a login of the Hugging Face hub", "none", remedy)
    api = HfApi()
    _require_rights(name, _ask(name, api.whoami))

    def model_info() -> list[Any]:  # in a list, because for `in_time` None is a hub that does not answer
        try:
            return [api.model_info(name)]
        except RepositoryNotFoundError:  # there is none of this name that the login can see
            return [None]

    (found,) = _ask(name, model_info)
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
    stale = sorted(name for name in repository.files - set(names) if _is_any(name, _PUSHED_WEIGHTS))
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
    return sorted(name for path in inside if _is_any(name := path.relative_to(folder).as_posix(), _PUSHED_FILES))


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern that has as many folders."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _require_name(name: str) -> None:
    """Raises a ConfigError unless `name` is OWNER/NAME by the hub's rules."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(name)
        if name.count("/") == 1:
            return
    rule = "must be OWNER/NAME, of letters, digits, '-', '_' and '.'"
    raise ConfigError("--push", rule, name, "for example --push me/my-student")


def _require_rights(name: str, who: dict[str, Any]) -> None:
    user, owner = str(who.get("name")), name.partition("/")[0]
    if ((who.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        rule = f"the token of {user} must be one that may write"
        remedy = "make one that may write, and log in with it (`hf auth login`)"
        raise ConfigError(f"--push {name}", rule, "one that may read", remedy)
    owners = [user, *(str(organisation.get("name")) for organisation in who.get("orgs") or ())]
    if owner.lower() not in (one.lower() for one in owners):
        rule = f"{user} cannot write to what belongs to {owner}"
        raise ConfigError(f"--push {name}", rule, None, f"push to one of {', '.join(owners)}")


def _ask(name: str, request: Callable[[], Any]) -> Any:
    from huggingface_hub import constants

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
        remedy = f"check the network, or push from a machine that reaches {constants.ENDPOINT}"
        remedy = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else remedy
        raise ConfigError(f"--push {name}", rule, _reason(answer), remedy) from answer
    return answer


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
