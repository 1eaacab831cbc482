import pytest

from distill_rl.system.redact import REDACTED, in_text, redact

# Invented, in the formats of real providers.
SHAPES = [
    "sk-ant-api03-Xy9_kQ2-abcDEF0123456789-ghiJKL_mnoPQR456-aA",
    "sk-proj-abc_DEF-ghi0123456789_jklMNOpqr",
    "sk-abcdefghijklmnop0123456789ABCDEF",
    "sk-abc-def_ghi-0123456789abcdef",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz0123456789",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "glpat-ab-cd_efGH0123456789x",
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "xoxb-123456789012-1234567890123-abcDEFghiJKLmnoPQRstuVWX",
    "AKIAIOSFODNN7EXAMPLE",
    "nvapi-abcDEF_ghi-jkl0123456789mnoPQRstuVWXyz0123456789abcDEFghiJKLmno",
    "gsk_abcDEFghi0123456789jklMNOpqrSTUvwx0123456789yzABCdef",
    "AIzaSyA-abcDEF_0123456789ghiJKLmnoPQRst",
    "pypi-AgEIcHlwaS5vcmcCJGFiY2RlZi0wMTIzLTQ1NjctODlhYi1jZGVmMDEyMzQ1NjcAAipb",
    "npm_abcDEFghi0123456789jklMNOpqrSTUvwxyz",
    "xai-abcDEFghi0123456789jklMNOpqrSTUvwx0123456789",
    "pplx-abcdef0123456789abcdef0123456789abcdef0123456789",
    "r8_abcDEFghi0123456789jklMNOpqrSTUvwxyz0",
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxMjM0NTY3ODkwIn0.",
    "eyJhbGciOiJkaXIiLCJlbmMiOiJBMTI4R0NNIn0..48V1_ALb6US04U3b.5eym8TW_c8SuK0ltJ3rpYIzOeDQz7TALvtu6UG9oMo4vpzs9tX.XFBoMYUZodetZdvTiFvSkQ",
]
ORDINARY = [
    "sk-learn", "scikit-learn-1.5.0", "sk-learn-compatible-estimators-of-all-kinds", "risk-free", "risk-free-investment-strategies-2024",
    "disk-0123456789abcdefghij", "/data/task-abcdefghijklmnopqrst/hf_small/x.safetensors", "/models/hf_checkpoints/step-120",
    "98564c4b0f2d4e6a8c1e3f5a7b9d0c2e4f6a8b0d", "AKIAISNOKEY", "nvapi-bindings-for-all-languages", "pypi-compatible-mirror-of-2024",
    "gsk_small", "a bearer of good tidings", "Bearer authentication failed", "eyJ.eyJ.x", "Basic understanding-of-transformers", "AIzawa-2024",
]  # fmt: skip


@pytest.mark.parametrize("secret", SHAPES)
def test_tokens_are_recognised_by_their_format(secret):
    for text in ("{}", "Bearer {}", "key={}, then", '"{}"', "({}).", "https://host/{}/x"):
        assert in_text(text.format(secret)) == text.format(REDACTED)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_words_stay(text):
    assert in_text(text) == text


def test_values_under_secret_names_are_redacted():
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
        ("https://host/x?sv=2024&sig=a%2Fb%3D&se=1", f"https://host/x?sv=2024&sig={REDACTED}&se=1"),
        ("https://host/x?sig=abc", f"https://host/x?sig={REDACTED}"),
        ("https://host/x?monkeys=3&design=4", "https://host/x?monkeys=3&design=4"),
        ("hf_abcdefghijklmnopqrstuvwxyz", REDACTED),
        ("authorization: bearer abc.DEF/0123456789~+==; x", f"authorization: bearer {REDACTED}; x"),
        ("Authorization: Basic bWU6aHVudGVyMjIyMg==", f"Authorization: Basic {REDACTED}"),
        ("model hf_small, task-abcdefghijklmnopqrst, a@b", "model hf_small, task-abcdefghijklmnopqrst, a@b"),
    ],
)  # fmt: skip
def test_secrets_inside_a_text_are_redacted(text, left):
    assert in_text(text) == left
