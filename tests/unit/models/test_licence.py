from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill_rl.config.schema import StudentConfig
from distill_rl.models.files import licence, licence_in, licence_of


@pytest.mark.parametrize(
    ("card", "config", "known"),
    [
        ("---\nlicense: llama3.2\n---\n", {"license": "mit"}, {"license": "llama3.2"}),
        (
            "---\nlicense: other\nlicense_name: theirs\nlicense_link: LICENSE\ntags: [a]\n---\n",
            {},
            {"license": "other", "license_name": "theirs", "license_link": "LICENSE"},
        ),
        ("# no header\n", {"license": "Apache-2.0"}, {"license": "apache-2.0"}),
        ("---\nlicense: [mit, gemma]\n---\n", {}, {}),
        ("---\nlicense: !!python/object/apply:os.getcwd []\n---\n", {}, {}),
        ("---\n- a list\n---\n", {"license": "for research only"}, {"license": "other", "license_name": "for-research-only"}),
        ('---\nlicense: "two\\nlines"\n---\n', {"license": 3}, {}),
        (None, None, {}),
    ],
)  # fmt: skip
def test_licence_is_that_of_the_card_or_the_config(
    tmp_path: Path, card: str | None, config: dict | None, known: dict[str, str]
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert licence_in(tmp_path) == known
    assert licence_of(StudentConfig(model=str(tmp_path))) == known


def test_a_name_that_the_hub_does_not_list_is_another_licence() -> None:
    assert licence(" MIT ") == {"license": "mit"}
    assert licence("My Own (v2)!") == {"license": "other", "license_name": "my-own-v2"}


def test_a_model_that_is_not_here_has_no_known_licence() -> None:
    assert licence_of(StudentConfig(model="some-org/some-model")) == {}
