"""Each dialect reads the answers of its server to the bit, and refuses what is not an answer to what was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distill_rl.errors import DistillError, NumericsError
from distill_rl.teacher.base import Scores
from distill_rl.teacher.endpoint import DIALECTS, Down, WrongAnswer, models_of

PROMPT = np.array([7, 3, 5, 9], np.int32)
# Of the tokens after each position but the last: id → log-prob. The one that follows is in the top 3, last of it, not in it.
TOPS = [{3: -0.5, 8: -1.5, 1: -3.0}, {2: -0.25, 4: -2.0, 5: -4.0}, {1: -1.0, 2: -1.25, 3: -2.5}]
FOLLOWING = [-0.5, -4.0, -6.5]
K = 3


def vllm() -> dict[str, Any]:
    positions: list[Any] = [None]
    for top, token, value in zip(TOPS, PROMPT[1:], FOLLOWING):
        entries = {int(token): value} | top
        positions.append({str(i): {"logprob": v, "rank": 1, "decoded_token": '"]}'} for i, v in entries.items()})
    choice = {"prompt_logprobs": positions, "prompt_token_ids": PROMPT.tolist(), "text": "x", "logprobs": None}
    return {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 4}}


def sglang() -> dict[str, Any]:
    pairs = [[None, 7, None], *([v, int(t), None] for v, t in zip(FOLLOWING, PROMPT[1:]))]
    tops = [None, *([[v, i, None] for i, v in top.items()] for top in TOPS)]
    return {"text": "x", "meta_info": {"input_token_logprobs": pairs, "input_top_logprobs": tops, "id": "1"}}


def openai() -> dict[str, Any]:
    tops: list[Any] = [None]
    for top, token, value in zip(TOPS, PROMPT[1:], FOLLOWING):
        tops.append({f"token_id:{i}": v for i, v in ({int(token): value} | top).items()})
    tokens = [f"token_id:{i}" for i in [*PROMPT.tolist(), 4]]
    logprobs = {"tokens": tokens, "top_logprobs": [*tops, {"token_id:4": -0.1}], "token_logprobs": []}
    return {"model": "m", "choices": [{"logprobs": logprobs}]}


ANSWERS: dict[str, Callable[[], dict[str, Any]]] = {"vllm": vllm, "sglang": sglang, "openai": openai}


def read(api: str, answer: Any, *, prompt: np.ndarray = PROMPT, model: str = "m", k: int = K) -> Scores:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return DIALECTS[api].scores(body, model, prompt, k)


@pytest.mark.parametrize("api", ANSWERS)
def test_an_answer_becomes_the_k_most_likely_in_order(api: str) -> None:
    scores = read(api, ANSWERS[api]())
    assert scores.ids.tolist() == [[3, 8, 1], [2, 4, 5], [1, 2, 3]]
    assert scores.logprobs.tolist() == [[-0.5, -1.5, -3.0], [-0.25, -2.0, -4.0], [-1.0, -1.25, -2.5]]
    assert scores.next_logprobs.tolist() == FOLLOWING
    assert (scores.ids.dtype, scores.logprobs.dtype, scores.next_logprobs.dtype) == (np.int32, np.float32, np.float32)


@pytest.mark.parametrize("api", ANSWERS)
def test_entries_may_come_in_any_order(api: str) -> None:
    answer = ANSWERS[api]()
    positions = {
        "vllm": lambda: answer["choices"][0]["prompt_logprobs"],
        "sglang": lambda: answer["meta_info"]["input_top_logprobs"],
        "openai": lambda: answer["choices"][0]["logprobs"]["top_logprobs"],
    }[api]()
    for i, position in enumerate(positions):
        if isinstance(position, dict):
            positions[i] = dict(reversed(position.items()))
        elif position is not None:
            positions[i] = position[::-1]
    one, other = read(api, answer), read(api, ANSWERS[api]())
    assert np.array_equal(one.ids, other.ids)
    assert np.array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("api", ANSWERS)
def test_an_impossible_token_is_absent(api: str) -> None:
    text = json.dumps(ANSWERS[api]()).replace("-3.0", "-9999.0")
    scores = read(api, text.encode())
    assert scores.ids[0].tolist() == [3, 8, -1]
    assert scores.logprobs[0].tolist() == [-0.5, -1.5, -np.inf]


@pytest.mark.parametrize("api", ANSWERS)
@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        ("-1.25", "NaN", NumericsError, "log-probs must be numbers; got NaN"),
        ("-1.25", "-Infinity", NumericsError, "log-probs must be numbers; got -Infinity"),
        ("-1.25", "null", NumericsError, "log-probs must be numbers; got null"),
        ("-1.25", "0.5", NumericsError, "log-probs must not be positive; got 0.5"),
        ("-1.25", '"x"', WrongAnswer, "answers in another form"),
        ("-6.5", "-1.5", WrongAnswer, "one that it left out is more likely"),
    ],
)
def test_what_is_no_log_prob_is_refused(api: str, old: str, new: str, kind: type, words: str) -> None:
    text = json.dumps(ANSWERS[api]())
    assert old in text
    with pytest.raises(DistillError, match=words) as caught:
        read(api, text.replace(old, new).encode())
    assert type(caught.value) is kind


@pytest.mark.parametrize("api", ANSWERS)
def test_an_answer_about_other_tokens_is_refused(api: str) -> None:
    for prompt in ([7, 3, 5, 8], [7, 3, 5], [1, 3, 5, 9]):
        with pytest.raises(WrongAnswer, match=r"must score the|log-probs of the prompt's"):
            read(api, ANSWERS[api](), prompt=np.array(prompt, np.int32))


@pytest.mark.parametrize("api", ANSWERS)
@pytest.mark.parametrize("k", [2, 4])
def test_another_number_of_entries_is_refused(api: str, k: int) -> None:
    if (api, k) in (("vllm", 2), ("openai", 2)):
        k = 1  # a position with two entries more; with one more, it may be the token that follows
    with pytest.raises(WrongAnswer, match=f"must give {k} log-probs per token"):
        read(api, ANSWERS[api](), k=k)


def test_a_token_twice_is_refused() -> None:
    text = json.dumps(sglang()).replace("[-1.5, 8, null]", "[-1.5, 3, null]")
    with pytest.raises(WrongAnswer, match="each token once"):
        read("sglang", text.encode())


@pytest.mark.parametrize("api", ["vllm", "openai"])
def test_the_answer_of_another_model_is_refused(api: str) -> None:
    with pytest.raises(WrongAnswer, match=r"must serve other \(teachers\[\]\.model\); got m"):
        read(api, ANSWERS[api](), model="other")


@pytest.mark.parametrize("api", ANSWERS)
def test_half_an_answer_is_damaged_wherever_it_ends(api: str) -> None:
    body = json.dumps(ANSWERS[api]()).encode()
    for end in range(0, len(body), 7):
        with pytest.raises(Down):
            read(api, body[:end])


def test_tokens_as_texts_are_refused_with_the_way_out() -> None:
    text = json.dumps(openai()).replace("token_id:", "<")
    with pytest.raises(WrongAnswer, match=r"token_id:N.*--return-tokens-as-token-ids"):
        read("openai", text.encode())


def test_a_server_without_echoed_ids_is_refused() -> None:
    answer = vllm()
    del answer["choices"][0]["prompt_token_ids"]
    with pytest.raises(WrongAnswer, match="prompt_token_ids"):
        read("vllm", answer)


@pytest.mark.parametrize("api", ANSWERS)
def test_a_request_asks_for_plain_log_probs(api: str) -> None:
    asked = json.loads(DIALECTS[api].request("m", PROMPT.tolist(), K))
    sampling = asked.get("sampling_params", asked)
    assert (sampling["temperature"], sampling["top_p"], sampling["presence_penalty"]) == (0, 1.0, 0.0)
    assert (asked.get("prompt") or asked["input_ids"]) == PROMPT.tolist()
    assert K in (asked.get("prompt_logprobs"), asked.get("logprobs"), asked.get("top_logprobs_num"))


def test_the_list_of_models() -> None:
    (card,) = models_of(b'{"object":"list","data":[{"id":"m","max_model_len":99,"root":"/x"}]}')
    assert (card.id, card.max_model_len) == ("m", 99)
    for body in (b"<html>", b"{}", b'{"data":[{"name":"m"}]}'):
        with pytest.raises(WrongAnswer, match="must list the server's models"):
            models_of(body)
