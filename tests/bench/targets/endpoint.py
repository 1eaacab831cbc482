"""What the client of a served teacher costs: CPU time per token, by interface and k, and its share of a run's time.

A server in a process of its own answers from memory, so that only the client is measured: building requests, HTTP, reading
JSON, arrays and all checks. For the share, the server takes 500 µs per token, one document after the other.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from distill_rl.config.schema import TeacherConfig
from distill_rl.config.schema.backends import EndpointConfig
from distill_rl.teacher.endpoint import DIALECTS, EndpointScorer
from tests.bench import harness

VOCABULARY, MODEL = 150_000, "bench"
SERVER_US = 500
MOST_US, MOST_SHARE = 50.0, 0.10
"""Targets: CPU time per token at k = 64, and the client's share of the time."""
_START_S = 120


def _answer(api: str, prompt: np.ndarray, k: int) -> bytes:
    """As a server of this interface answers; the token that follows is among the k most likely at every other position."""
    rng = np.random.default_rng(int(prompt.sum()))
    positions = []
    for p, following in enumerate(prompt[1:].tolist()):
        values = np.sort(rng.normal(-8, 3, k + 1).astype(np.float32))[::-1].clip(max=-1e-3).tolist()
        ids = [i for i in rng.choice(VOCABULARY, k + 2, replace=False).tolist() if i != following][:k]
        top = dict(zip(ids, values))
        if p % 2:
            top.pop(ids[-1])
            top[following] = values[k - 1]
        positions.append((following, top[following] if p % 2 else values[k], top))
    echoed = prompt.tolist()
    if api == "sglang":
        pairs = [[None, echoed[0], None], *([value, i, None] for i, value, _ in positions)]
        tops = [None, *([[value, i, None] for i, value in top.items()] for *_, top in positions)]
        answer: dict[str, Any] = {"meta_info": {"input_token_logprobs": pairs, "input_top_logprobs": tops}}
    else:
        entries = [{i: value} | top for i, value, top in positions]
        if api == "vllm":
            named = [
                {str(i): {"logprob": v, "rank": r, "decoded_token": " token"} for r, (i, v) in enumerate(entry.items())}
                for entry in entries
            ]
            choice: dict[str, Any] = {"prompt_token_ids": echoed, "prompt_logprobs": [None, *named]}
        else:
            by_name = [{f"token_id:{i}": value for i, value in entry.items()} for entry in entries]
            choice = {
                "logprobs": {"tokens": [f"token_id:{i}" for i in echoed], "top_logprobs": [None, *by_name]},
            }
        answer = {"model": MODEL, "choices": [choice]}
    return json.dumps(answer, separators=(",", ":")).encode()


def _serve(api: str, prompts: list[np.ndarray], k: int, us_per_token: float, port: Any) -> None:
    """The server's process: tells its port, and serves until it is killed."""
    bodies = {tuple(prompt.tolist()): _answer(api, prompt, k) for prompt in prompts}
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": MODEL}]}).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = tuple(asked.get("input_ids") or asked["prompt"])
            if us_per_token:
                with one_at_a_time:
                    time.sleep(us_per_token * 1e-6 * len(prompt))
            self._send(bodies[prompt])

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port.put(server.server_address[1])
    server.serve_forever()


def _ask(api: str, prompts: list[np.ndarray], k: int, us_per_token: float, rounds: int) -> tuple[float, float]:
    """(CPU seconds, seconds) of the fastest of some rounds through all prompts."""
    context = multiprocessing.get_context("spawn")
    port = context.SimpleQueue()
    process = context.Process(target=_serve, args=(api, prompts, k, us_per_token, port), daemon=True)
    process.start()
    try:
        url = f"http://127.0.0.1:{port.get()}"
        teacher = TeacherConfig(name="bench", model=MODEL, backend="endpoint", endpoint=EndpointConfig([url], api))  # type: ignore[arg-type]
        scorer = EndpointScorer(teacher, None)
        best = (float("inf"), float("inf"))
        for _ in range(rounds):
            began, cpu = time.perf_counter(), time.process_time()
            for _ in scorer.score(prompts, k):
                pass
            best = min(best, (time.process_time() - cpu, time.perf_counter() - began))
        scorer.close()
        return best
    finally:
        process.kill()
        process.join(_START_S)


def _parse(api: str, prompt: np.ndarray, k: int) -> dict[str, float]:
    """CPU µs per token of reading one answer: by the standard library, by msgspec, and by the dialect with its checks."""
    body = _answer(api, prompt, k)
    dialect = DIALECTS[api]()
    ways = {
        "json": lambda: json.loads(body),
        "msgspec": lambda: msgspec.json.decode(body),
        "dialect": lambda: dialect.scores(body, MODEL, prompt, k),
    }
    found = {}
    for name, read in ways.items():
        times = []
        for _ in range(5):
            cpu = time.process_time()
            read()
            times.append(time.process_time() - cpu)
        found[name] = round(min(times) * 1e6 / len(prompt), 1)
    return found | {"bytes": round(len(body) / len(prompt))}


def measure(_: Path, *, tokens: int = 512, documents: int = 16, rounds: int = 3) -> dict[str, Any]:
    """The figures, by interface and k.

    Args:
        tokens: tokens of a document.
        documents: documents of a batch.
        rounds: rounds, of which the fastest counts.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, tokens).astype(np.int32) for _ in range(documents)]
    total = tokens * documents
    rows: dict[str, dict[str, Any]] = {}
    for api in DIALECTS:
        for k in (20, 64):
            parsed = _parse(api, prompts[0], k)
            cpu = _ask(api, prompts, k, 0, rounds)[0]
            busy, wall = _ask(api, prompts, k, SERVER_US, 1)
            rows[f"{api}, k = {k}"] = {
                "client_us": round(cpu * 1e6 / total, 1),
                "share": round(busy / wall, 3),
                **{f"{name}_us" if name != "bytes" else "bytes_per_token": value for name, value in parsed.items()},
            }
    return {"tokens": tokens, "documents": documents, "server_us_per_token": SERVER_US, "client": rows}


def verdict(figures: dict[str, Any]) -> list[str]:
    """What misses its target, one line each."""
    missed = []
    for name, row in figures["client"].items():
        if row["client_us"] > MOST_US:
            missed.append(f"{name}: {row['client_us']} µs of CPU per token, more than {MOST_US:g}")
        if row["share"] > MOST_SHARE:
            missed.append(f"{name}: {100 * row['share']:.3g} % of the time, more than {100 * MOST_SHARE:g} %")
    return missed


main = harness.program("endpoint", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
