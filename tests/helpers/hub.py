"""A stand-in for the Hugging Face hub: the requests of an upload, as huggingface_hub makes them, over real HTTP.

It knows who is logged in, creates repositories, checks the headers of model cards, and takes files by Git LFS and commits
(https://huggingface.co/docs/hub/api, https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md). Xet, the hub's newer
storage, is not there: clients set HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from huggingface_hub import ModelCard

from distill_rl.models.files import IDENTIFIERS

TOKENS = {"hf_writing_" + 24 * "w": "write", "hf_reading_" + 24 * "r": "read", "hf_failing_" + 24 * "f": "write"}
"""By token, what it may do. The hub breaks down at a commit with the last one."""
WRITE, READ, FAIL = TOKENS
CUT = "hf_cutting_" + 24 * "c"
"""A token at which the connection is cut, as by a bad network."""
_LFS = (".safetensors",)
_DATASET = re.compile(r"(?:[\w-]+/)?[\w.-]+")


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)
    """Of every commit the `summary`, and the paths that were `added` and `deleted`."""


@dataclass
class Hub:
    """The user `me` is a member of `lab`; `stranger/model` belongs to somebody else."""

    repos: dict[str, Repo] = field(default_factory=lambda: {"stranger/model": Repo(private=False)})
    large: dict[str, bytes] = field(default_factory=dict)
    """Contents by sha256."""
    requests: list[str] = field(default_factory=list)
    address: str = ""


@contextmanager
def hub() -> Iterator[Hub]:
    """The hub, at an address of this machine, until the end of the block."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def card_errors(card: str) -> list[str]:
    """What the hub has against the header of a model card."""
    try:
        content = ModelCard(card).data
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    header, errors = content.to_dict(), []
    if header.get("license") not in IDENTIFIERS:
        errors.append(f'"license" must be one of the list, not {header.get("license")}')
    if not re.fullmatch(r"[a-z0-9.-]+", header.get("license_name", "a")):
        errors.append('"license_name" must be a slug')
    if header.get("base_model_relation", "finetune") not in ("adapter", "merge", "quantized", "finetune"):
        errors.append('"base_model_relation" is none of the hub')
    types = [result.dataset_type for result in content.eval_results or ()]
    errors += [f'"dataset.type" {name} is no identifier' for name in types if not _DATASET.fullmatch(name)]
    return errors


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self._allowed():
            return
        if self.path == "/api/whoami-v2":
            access = {"accessToken": {"role": TOKENS[self._token()], "displayName": "test"}}
            self._answer({"type": "user", "name": "me", "orgs": [{"name": "lab"}], "auth": access})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(?:/revision/main)?(?:\?.*)?", self.path):
            repo = self.hub.repos.get(found[1])
            if repo is None:
                self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                return
            siblings = [{"rfilename": name} for name in repo.files]
            sha = hashlib.sha1(str(len(repo.commits)).encode()).hexdigest()
            self._answer({"id": found[1], "sha": sha, "private": repo.private, "siblings": siblings})
        else:
            self._answer({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        body = self._body()
        if not self._allowed():
            return
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            errors = card_errors(json.loads(body)["content"])
            self._answer({"errors": [{"message": text} for text in errors]}, 400 if errors else 200)
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", self.path):
            self._answer({"files": [_upload_mode(file["path"]) for file in json.loads(body)["files"]]})
        elif re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", self.path):
            objects = [self._place(one) for one in json.loads(body)["objects"]]
            self._answer({"transfer": "basic", "objects": objects})
        elif self.path == "/verify":
            asked = json.loads(body)
            self._answer({}, 200 if len(self.hub.large.get(asked["oid"], b"")) == asked["size"] else 404)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": "no such page"}, 404)

    def do_PUT(self) -> None:
        content = self._body()
        oid = self.path.removeprefix("/lfs/")
        self.hub.requests.append(f"PUT {len(content)}")
        good = hashlib.sha256(content).hexdigest() == oid
        if good:
            self.hub.large[oid] = content
        self._answer({}, 200 if good else 400)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.repos:
            self._answer({"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"}, 409)
            return
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.repos[name] = Repo(private)
        self._answer({"url": f"{self.hub.address}/{name}"})

    def _place(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Where a large file goes; nowhere if it is here already."""
        if asked["oid"] in self.hub.large:
            return asked
        actions = {
            "upload": {"href": f"{self.hub.address}/lfs/{asked['oid']}"},
            "verify": {"href": f"{self.hub.address}/verify"},
        }
        return asked | {"actions": actions}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        if self._token() == FAIL:
            self._answer({"error": "the disk is full"}, 500)
            return
        repo, commit = self.hub.repos[name], {"summary": "", "added": [], "deleted": []}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                commit["summary"] = value["summary"]
            elif line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
                commit["added"].append(value["path"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.large[value["oid"]]
                commit["added"].append(value["path"])
            elif line["key"] == "deletedFile":
                del repo.files[value["path"]]
                commit["deleted"].append(value["path"])
        repo.commits.append(commit)
        oid = hashlib.sha1(str(len(repo.commits)).encode()).hexdigest()
        self._answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.address}/{name}/commit/{oid}"})

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _allowed(self) -> bool:
        """Whether the request is to be answered as it should; otherwise that has been dealt with."""
        self.hub.requests.append(f"{self.command} {self.path.partition('?')[0]}")
        if self._token() == CUT:
            self.close_connection = True
            self.connection.close()
            return False
        if self._token() not in TOKENS:
            self._answer({"error": "Invalid credentials in Authorization header"}, 401)
            return False
        return True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)


def _upload_mode(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "lfs" if path.endswith(_LFS) else "regular", "shouldIgnore": False}
