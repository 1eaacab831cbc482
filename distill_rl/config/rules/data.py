"""The rules that the settings of the data must obey, as far as they can be checked without opening a file."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.schema import Config
from distill_rl.config.schema.fields import MISSING
from distill_rl.errors import problem


def data_problems(config: Config) -> Iterator[str]:
    """Yields problems of the data, one line each.

    No data, or two kinds of them; roles that contradict `data.loss_on`; long documents that cannot be split.
    """
    data = config.data
    if data.path is None and not data.sources:
        remedy = "set it in the file or add data.path=PATH; or give data.sources"
        yield problem("data.path", "missing value", None, remedy)
    if data.path not in (None, MISSING) and data.sources:
        remedy = "leave data.path out, or make it one of the sources"
        yield problem("data.path", "data.sources is given, too; a run has one or the other", data.path, remedy)
    if data.loss_roles and data.loss_on == "assistant" and "assistant" not in data.loss_roles:
        rule = "must have assistant, as data.loss_on is assistant"
        yield problem("data.loss_roles", rule, data.loss_roles, "add assistant, or leave data.loss_on out")
    if not all(role.strip() for role in data.loss_roles):
        yield problem("data.loss_roles", "must be names of roles", data.loss_roles, "[] lets data.loss_on decide")
    if data.long_documents == "split":
        if config.wants_whole_batch:
            rule = (
                "pieces make a batch of any number of rows; loss.dynamic_scale and teachers[].score need all of a batch "
                "at once"
            )
            yield problem("data.long_documents", rule, "split", "use data.long_documents=cut")
        if data.max_length == 1:
            yield problem("data.max_length", "a piece of a document has 2 tokens or more", 1, "raise it")
    if data.concatenate and data.format in ("messages", "sharegpt", "alpaca"):
        yield concatenation_problem(f"data.format={data.format}")


def concatenation_problem(value: str) -> str:
    """The line for chats that are to be joined.

    Args:
        value: what holds them, in words.
    """
    remedy = "leave data.concatenate out; data.packing puts several chats into a row"
    return problem("data.concatenate", "only texts can be joined, not chats", value, remedy)
