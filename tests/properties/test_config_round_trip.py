"""Any well-typed configuration reads back unchanged after it was written to YAML."""

import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.config.load import load_config
from distill_rl.config.paths import replace_paths
from distill_rl.config.save import redact, save_config
from distill_rl.config.schema import Config
from distill_rl.config.walk import MISSING, hints, is_mapping, item_kind, unwrap

# YAML cannot carry lone surrogates and most control characters; "???" means "missing"; "~x" names the home of a user.
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12),
    st.sampled_from(
        [
            "null",
            "~",
            "off",
            "yes",
            "1e3",
            "0o7",
            "${run.name}",
            r"\${x",
            r"\\${",
            r"$\{",
            r"$\\{x}",
            "a: b",
            "# c",
            "'",
            '"',
            "- x",
            "[",
            "?",
        ]
    ),
).filter(lambda text: text != MISSING and redact(text) == text and (text[:1] != "~" or text[1:2] in ("", "/")))


def instances(kind: Any) -> st.SearchStrategy:
    plain, optional = unwrap(kind)
    if is_dataclass(plain):
        strategy = st.builds(plain, **{entry.name: instances(hints(plain)[entry.name]) for entry in fields(plain)})
    elif get_origin(plain) is Literal:
        strategy = st.sampled_from(get_args(plain))
    elif is_mapping(plain):
        single = TEXTS | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
        names = TEXTS.filter(lambda name: "${" not in name and "$\\" not in name)
        strategy = st.dictionaries(names, single | st.lists(single, max_size=2), max_size=2)
    elif item_kind(plain) is not None:
        strategy = st.lists(instances(item_kind(plain)), max_size=2)
    else:
        strategy = {
            bool: st.booleans(),
            int: st.integers(-(2**70), 2**70),
            float: st.floats(allow_nan=False, allow_infinity=False),
            str: TEXTS,
        }[plain]
    return st.none() | strategy if optional else strategy


@settings(max_examples=30, deadline=None)
@given(instances(Config))
def test_saving_and_loading_are_inverse(config: Config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        save_config(config, path)
        again = load_config(path)
    if not config.run.name:
        config.run.name = "run"
    replace_paths(config, lambda _, path: str(Path(path).expanduser()) if path and path.startswith("~") else path)
    assert again == config
