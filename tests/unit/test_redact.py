import pytest

from distill_rl.redact import REDACTED, in_text, redact


def test_all_that_stands_under_the_name_of_a_secret_is_taken_out_and_column_names_are_not():
    tree = {
        "hub": {"token": "hf_x", "api_key": "k", "password": 12345, "client_secret": "s", "TOKEN": "t", "keys": ["a"]},
        "spelt": {"api-key": "k", "accessToken": "t", "monkey": "m", "credentials": {"user": "u", "pin": ["1"]}},
        "data": {"text_key": "body", "messages_key": "chat", "tokenizer": "t", "path": "https://me:pw@host/x"},
        "empty": {"token": None, "password": ""},
        "many": {"token": ["a", "b"]},
    }
    secrets = ("token", "api_key", "password", "client_secret", "TOKEN")
    assert redact(tree) == {
        "hub": {**dict.fromkeys(secrets, REDACTED), "keys": ["a"]},
        "spelt": {
            "api-key": REDACTED, "accessToken": REDACTED, "monkey": "m", "credentials": {"user": REDACTED, "pin": [REDACTED]},
        },
        "data": {"text_key": "body", "messages_key": "chat", "tokenizer": "t", "path": f"https://{REDACTED}@host/x"},
        "empty": {"token": None, "password": ""},
        "many": {"token": [REDACTED, REDACTED]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("no such file https://me:pw@host/x, or s3://k:s@b", f"no such file https://{REDACTED}@host/x, or s3://{REDACTED}@b"),
        ("https://me:p@ss@host/x", f"https://{REDACTED}@host/x"),
        ("https://token@host/x?a=b@c", f"https://{REDACTED}@host/x?a=b@c"),
        ("https://host/x?a=1&api_key=abc&b=2", f"https://host/x?a=1&api_key={REDACTED}&b=2"),
        ("https://host/x?X-Amz-Signature=abc", f"https://host/x?X-Amz-Signature={REDACTED}"),
        ("https://host/x?monkeys=3", "https://host/x?monkeys=3"),
        ("hf_abcdefghijklmnopqrstuvwxyz", REDACTED),
        ("model hf_small, task-abcdefghijklmnopqrst, a@b", "model hf_small, task-abcdefghijklmnopqrst, a@b"),
    ],
)  # fmt: skip
def test_secrets_inside_a_text_are_taken_out(text, left):
    assert in_text(text) == left
