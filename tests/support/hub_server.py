"""A stand-in for the Hugging Face hub on this machine: the part of its HTTP interface that an upload uses.

Files of text are committed as they are, others by Git LFS: a batch of hashes, a PUT for each that the server lacks.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secretOfTheTest"
TEXT = (".json", ".md", ".txt", ".jinja")


@dataclass
class Hub:
    """repos: id -> file -> content. created: what was asked for each new repository. objects: LFS, by hash. puts:
    hashes that were sent. num_broken: so many of the next PUTs are refused. fields: id -> those of its model card.
    role: of the token. told: the
    status with which it says whose the token is."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    puts: list[str] = field(default_factory=list)
    num_broken: int = 0
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    role: str = "write"
    told: int = 200

    def create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        status = 409 if name in self.repos else 200
        if status == 200:
            self.created.append(asked)
            self.repos[name] = {}
        return status, {"url": f"{self.url}/{name}", "name": name}

    def choose_modes(self, asked: dict[str, Any]) -> tuple[int, Any]:
        modes = {file["path"]: "regular" if file["path"].endswith(TEXT) else "lfs" for file in asked["files"]}
        return 200, {
            "files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        }

    def list_actions(self, asked: dict[str, Any]) -> tuple[int, Any]:
        objects = []
        for each in asked["objects"]:
            action = {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}
            objects.append(each | ({} if each["oid"] in self.objects else {"actions": action}))
        return 200, {"transfer": "basic", "objects": objects}

    def put(self, oid: str, content: bytes) -> tuple[int, Any]:
        if self.num_broken:
            self.num_broken -= 1
            return 403, {"error": "the link has expired"}
        self.puts.append(oid)
        self.objects[oid] = content
        return 200, {}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.repos[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[name][value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}

    def answer(self, method: str, path: str, content: bytes) -> tuple[int, Any]:
        """Returns status and JSON of the answer to an authorized request."""
        if method == "PUT":
            return self.put(path.rpartition("/")[2], content)
        if path == "/api/whoami-v2":
            return self.told, {"name": "me", "auth": {"accessToken": {"role": self.role}}}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            name = found.group(1)
            return (200, {"id": name, "cardData": self.fields[name]}) if name in self.fields else (404, {})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self.commit(found.group(1), [json.loads(line) for line in content.splitlines()])
        asked = json.loads(content)
        if path == "/api/repos/create":
            return self.create(asked)
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
            return self.choose_modes(asked)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.list_actions(asked)
        return 404, {"error": f"{method} {path}"}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_known = self.headers.get("authorization") == f"Bearer {TOKEN}" or self.command == "PUT"
            path = self.path.partition("?")[0]
            status, found = hub.answer(self.command, path, content) if is_known else (401, {"error": "who are you?"})
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
