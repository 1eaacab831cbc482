"""Whole runs with a teacher behind a server: the same losses however it is asked, and everything that is wrong at once."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from distill_rl.config.load import load_config
from tests.helpers.command import distill_rl, distill_rl_in_process
from tests.helpers.one_process import train as train_in_process
from tests.helpers.served import APIS, ENDLESS, MODEL, StandIn, endless, self_signed

from tests.cli.test_capture import assert_equal_runs, capture, stored, train  # isort: skip

pytestmark = pytest.mark.cli

VALIDATED = "evaluate.every=4"


def config_of(material, folder: Path, *urls: str, teacher: str = "teacher", **settings: object) -> Path:
    """The usual configuration with the teacher `big` behind these addresses."""
    entry = {"name": "big", "backend": "endpoint", "model": MODEL, "url": f"[{', '.join(urls)}]", "api": "vllm"}
    entry |= {"tokenizer": material.root / teacher} | settings
    path = material.config(folder)
    text = ", ".join(f"{key}: {value}" for key, value in entry.items())
    path.write_text(re.sub(r"\{name: big.*\}", f"{{{text}}}", path.read_text()))
    return path


@pytest.fixture(scope="module")
def usual(material, cluster, tmp_path_factory) -> Path:
    """The run of one server, without look-ahead."""
    with StandIn() as server:
        config = config_of(material, tmp_path_factory.mktemp("usual"), server.url)
        return train(config, VALIDATED, "prefetch.depth=0", "aligner.workers=0", cluster=cluster)


def test_look_ahead_changes_no_bit(usual, material, cluster, tmp_path):
    with StandIn() as server:
        config = config_of(material, tmp_path, server.url, concurrency=2)
        assert_equal_runs(train(config, VALIDATED, "prefetch.depth=3", cluster=cluster), usual)


@pytest.mark.long_run
def test_neither_do_interface_servers_clients_and_faults(usual, material, cluster, tmp_path):
    with StandIn(token="s3cret-9") as one, StandIn(token="s3cret-9") as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTILL_RL_BIG_TOKEN", "s3cret-9")
        config = config_of(material, tmp_path, one.url, other.url, api="sglang", token_env="DISTILL_RL_BIG_TOKEN")
        check = distill_rl("check", "-c", config)
        assert check.code == 0, check.err
        # The run asks the server as `check` did before it trains, and the probe repeats nothing.
        one.settings.fault, one.settings.count, one.settings.spared = "reset", 3, len(one.seen.prompts)
        run = train(config, VALIDATED, "teachers.0.parallel.dp=2", "train.micro_batch_size=2", cluster=cluster)
        assert one.settings.count == 0
        assert_equal_runs(run, usual)
        assert min(len(one.seen.prompts), len(other.seen.prompts)) > 20
    assert not [file for file in run.rglob("*") if file.is_file() and b"s3cret-9" in file.read_bytes()]


@pytest.mark.parametrize("joined", [True, False])
def test_actors_trust_the_authority_that_the_environment_names(usual, material, cluster, tmp_path, monkeypatch, joined):
    certificate = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with StandIn(tls=certificate) as server:
        assert server.url.startswith("https:")
        config = config_of(material, tmp_path, server.url, retry_s=5)
        assert_equal_runs(train(config, VALIDATED, cluster=cluster if joined else None), usual)


@pytest.mark.long_run
def test_a_capture_of_a_server_is_trained_on_without_it(usual, material, cluster, tmp_path):
    with StandIn() as server:
        config = config_of(material, tmp_path / "capture", server.url)
        capture(config, tmp_path / "store", cluster=cluster)
    info = distill_rl_in_process("store", "info", tmp_path / "store").out
    assert f"served as {MODEL} by vllm, weights not known" in info
    path = material.config(tmp_path / "train")
    path.write_text(re.sub(r"\{name: big.*\}", f"{{name: big, {stored(tmp_path / 'store')}}}", path.read_text()))
    assert_equal_runs(train(path, VALIDATED, cluster=cluster), usual)


def test_another_tokenizer_is_aligned_with(material, tmp_path):
    with StandIn(vocabulary=600) as server:
        config = config_of(material, tmp_path, server.url, teacher="foreign")
        trained = train_in_process(load_config(config, ["train.steps=2"]), tmp_path / "export")
        assert len(trained.series("train/kl_loss")) == 2
        assert max(map(max, server.seen.prompts)) >= 320


@pytest.mark.parametrize("api", APIS)
def test_check_says_what_a_server_does(material, tmp_path, api):
    with StandIn() as server:
        ended = distill_rl_in_process("check", "-c", config_of(material, tmp_path, server.url, api=api))
        assert ended.code == 0, ended.err
        (line,) = [line for line in ended.out.splitlines() if "is served by" in line]
        assert line.startswith(
            f"# note       teachers.0.endpoint.url: {MODEL} is served by {api} at {server.url}: raw log-probs"
        )
        assert "a context of 4,096 tokens" in line
        assert "% of the probability in the top k of a sample" in line
        assert "tokens/s" in line
        assert f"# actors     big: 1 process to ask {server.url}" in ended.out


@pytest.mark.parametrize("original", [4096, 1024])
def test_a_context_with_other_frequencies_than_the_rows_need_is_refused(material, tmp_path, original):
    """Of a folder that holds the configuration beside the tokenizer; the server takes 4,096 tokens."""
    folder = shutil.copytree(
        material.root / "teacher", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model | {"rope_parameters": rope, "max_position_embeddings": 8192}))
    with StandIn() as server:
        ended = distill_rl_in_process("check", "-c", config_of(material, tmp_path, server.url, tokenizer=folder))
    if original == 4096:
        assert ended.code == 0, ended.err
        return
    assert lines_of(ended) == [
        "teachers.0.endpoint.url: an inference server has one set of rotary frequencies, with a context of 4,096 tokens that of long "
        "texts, while texts of up to 1,024 tokens have another one (longrope); start the server with a context of 1024 "
        "tokens and use data.max_length=1023, or serve the teacher with backend hf"
    ]


def lines_of(ended) -> list[str]:
    assert ended.code == 2, ended.out + ended.err
    return [line.removeprefix("distill-rl: error: ") for line in ended.errors]


def test_all_that_is_wrong_is_said_at_once_before_a_worker_starts(material, tmp_path):
    with (
        StandIn(max_logprobs=8, token="right") as server,
        socket.socket() as dead,
        pytest.MonkeyPatch.context() as patch,
    ):
        dead.bind(("127.0.0.1", 0))  # nobody listens
        nobody = f"http://127.0.0.1:{dead.getsockname()[1]}"
        patch.setenv("DISTILL_RL_TOKEN", "wrong")
        patch.setenv("DISTILL_RL_RIGHT_TOKEN", "right")
        config = config_of(material, tmp_path, nobody)
        served = f"backend: endpoint, model: {MODEL}, url: {server.url}, api: vllm"
        others = [
            f"{{name: b, {served}, tokenizer: {material.root}/teacher, token_env: DISTILL_RL_TOKEN}}",
            f"{{name: c, {served}, tokenizer: {material.root}/teacher, token_env: DISTILL_RL_RIGHT_TOKEN}}",
            f"{{name: d, {served}, tokenizer: {material.root}/foreign, token_env: DISTILL_RL_RIGHT_TOKEN, loss: same}}",
            f"{{name: e, {served}, tokenizer: {material.root}/teacher, token_env: DISTILL_RL_MISSING_TOKEN}}",
        ]
        overrides = [f"teachers.{i + 1}={text}" for i, text in enumerate(others)]
        ended = distill_rl("train", "-c", config, *overrides, "data.max_length=9000")
        lines = lines_of(ended)
        expected = [
            (f"teachers.0.endpoint.url: {nobody} must answer; got ", "refused"),
            (f"teachers.1.endpoint.token_env: {server.url} answers with status 401; got Unauthorized",),
            (f"loss.top_k: {server.url} says: Requested prompt logprobs of 16", "max allowed: 8", "--max-logprobs"),
            ("teachers.2.endpoint.url: ", "takes 4,096 tokens", "rows have 9,000"),
            ("teachers.3", "must have the student's vocabulary (loss: same); the tokenizers differ"),
            ("teachers.4.endpoint.token_env: ", "DISTILL_RL_MISSING_TOKEN"),
        ]
        for words in expected:
            assert [line for line in lines if all(word in line for word in words)], (words, lines)
    assert "starting" not in ended.out
    assert "wrong" not in " ".join(lines)
    assert not (tmp_path / "runs").exists()


def test_check_ends_where_answers_do_not(material, tmp_path):
    with endless(*ENDLESS["header"]) as one, endless(*ENDLESS["extension"]) as other:
        config = config_of(material, tmp_path, one, other, request_timeout_s=1)
        lines = lines_of(distill_rl("check", "-c", config))
    for url in (one, other):
        assert any(f"{url} must answer" in line and "no complete answer within 1 s" in line for line in lines), lines


def test_a_dry_run_needs_no_server(material, tmp_path):
    config = config_of(material, tmp_path, "http://127.0.0.1:9")
    ended = distill_rl("train", "-c", config, "--dry-run", "--gpus-per-node", "0")
    assert ended.code == 0, ended.err


def test_a_capture_of_a_server_needs_a_student(material, tmp_path):
    with StandIn() as server:
        config = config_of(material, tmp_path, server.url)
        config.write_text(re.sub(r"student: .*\n", "", config.read_text()))
        ended = distill_rl_in_process("capture", "-c", config, "--out", tmp_path / "store")
    assert any(line.startswith("student.model: ") and "name the student" in line for line in lines_of(ended))


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_is_named_and_not_the_server(material, tmp_path, content):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    ended = distill_rl_in_process("check", "-c", config_of(material, tmp_path, "https://127.0.0.1:9", ca_file=file))
    assert ended.code == 2
    (line,) = ended.errors
    assert line.startswith(
        f"distill-rl: error: teachers.0.endpoint.ca_file: must be a file with certificates (PEM); got {file}: "
    )
