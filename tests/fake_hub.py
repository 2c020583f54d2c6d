"""A small hub on this machine: repositories, branches, commits and files by HTTP, as huggingface_hub asks for them."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN, READER = "hf_writes", "hf_reads"


class FakeHub(ThreadingHTTPServer):
    """`repositories[name][branch]` is a list of commits, each a mapping from path to bytes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, list[dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()  # all may see that it is there, its files those who were let in
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """Those of a branch or of a commit."""
        for branch, commits in self.repositories[name].items():
            for number, files in enumerate(commits):
                if revision == sha(name, branch, number) or (revision == branch and number == len(commits) - 1):
                    return files
        return None

    def head(self, name: str, revision: str) -> str:
        commits = self.repositories[name].get(revision)
        return sha(name, revision, len(commits) - 1) if commits else revision


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def log_message(self, *_):
        pass

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0].replace("%2F", "/")
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, path):
                name = match.groupdict().get("name")
                if name and (
                    name not in self.server.repositories or (name in self.server.private and not self._token())
                ):
                    return self._refuse(404, "RepoNotFound")
                revision = match.groupdict().get("revision")
                if revision and self.command != "POST" and self.server.files(name, revision) is None:
                    return self._refuse(404, "RevisionNotFound")
                if self.command == "POST" and self._token() != TOKEN:
                    return self._refuse(403 if self._token() else 401)
                return method(self, body, **match.groupdict())
        return self._refuse(404)

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _refuse(self, status, code=None):
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _json(self, content):
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _welcome(self, body):
        self._json({})

    def _create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.server.repositories:
            return self._send(409, json.dumps({"url": f"{self.server.address}/{name}"}).encode(), {})
        self.server.repositories[name] = {"main": [{".gitattributes": b"*.safetensors filter=lfs"}]}
        if asked.get("visibility") == "private":
            self.server.private.add(name)
        return self._json({"url": f"{self.server.address}/{name}"})

    def _validate(self, body):
        self._json({"errors": [], "warnings": []})

    def _branch(self, body, name, branch):
        if branch in self.server.repositories[name]:
            return self._refuse(409)
        self.server.repositories[name][branch] = [self.server.files(name, "main")]
        return self._json({})

    def _preupload(self, body, name, revision):
        modes = {"uploadMode": "regular", "shouldIgnore": False}
        self._json({"files": [{"path": file["path"], **modes} for file in json.loads(body)["files"]]})

    def _commit(self, body, name, revision):
        lines = [json.loads(line) for line in body.splitlines()]
        added = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines[1:]}
        commits = self.server.repositories[name][revision]
        commits.append({**commits[-1], **added})
        oid = sha(name, revision, len(commits) - 1)
        self._json({"commitUrl": f"{self.server.address}/{name}/commit/{oid}", "commitOid": oid})

    def _info(self, body, name, revision="main"):
        self._json({"id": name, "sha": self.server.head(name, revision), "private": name in self.server.private})

    def _tree(self, body, name, revision):
        files = self.server.files(name, revision)
        self._json(
            [{"type": "file", "path": path, "size": len(data), "oid": blob(data)} for path, data in files.items()]
        )

    def _resolve(self, body, name, revision, path):
        if name in self.server.gated:
            return self._refuse(403, "GatedRepo")
        data = self.server.files(name, revision).get(path)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        return self._send(200, data, {"ETag": f'"{blob(data)}"', "X-Repo-Commit": self.server.head(name, revision)})


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
ROUTES = {
    r"/?": Handler._welcome,
    r"/api/repos/create": Handler._create,
    r"/api/validate-yaml": Handler._validate,
    rf"/api/models/{NAME}": Handler._info,
    rf"/api/models/{NAME}/revision/(?P<revision>[\w-]+)": Handler._info,
    rf"/api/models/{NAME}/branch/(?P<branch>[\w-]+)": Handler._branch,
    rf"/api/models/{NAME}/preupload/(?P<revision>[\w-]+)": Handler._preupload,
    rf"/api/models/{NAME}/commit/(?P<revision>[\w-]+)": Handler._commit,
    rf"/api/models/{NAME}/tree/(?P<revision>[\w-]+)": Handler._tree,
    rf"/{NAME}/resolve/(?P<revision>[\w-]+)/(?P<path>.+)": Handler._resolve,
}


def sha(name: str, branch: str, number: int) -> str:
    return hashlib.sha1(f"{name} {branch} {number}".encode()).hexdigest()


def blob(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
