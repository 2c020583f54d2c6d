"""A small hub on this machine: repositories, branches and files by HTTP, as huggingface_hub asks for them."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "hf_writes"


class FakeHub(ThreadingHTTPServer):
    """`repositories[name][branch]` maps paths to bytes; `private` are some of the names."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0].replace("%2F", "/")
        for pattern, answer in ROUTES.items():
            if match := re.fullmatch(pattern, path):
                name, *where = match.groups() or [None]
                if self.command == "POST" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.send(401, b"{}")
                if name and name not in self.server.repositories:
                    return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return answer(self, body, name, *where)
        return self.send(404, b"{}")

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        pass

    def send(self, status, content, headers=()):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **dict(headers)}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def files(self, name, revision):
        """The files of a branch, or of the commit that it is at."""
        branches = self.server.repositories[name]
        return next((branches[branch] for branch in branches if revision in (branch, digest(branch))), None)

    def welcome(self, body, name):
        self.send(200, {"errors": [], "warnings": []})

    def create(self, body, name):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        status = 409 if name in self.server.repositories else 200
        self.server.repositories.setdefault(name, {"main": {}})
        self.server.private |= {name} if asked.get("private") or asked.get("visibility") == "private" else set()
        self.send(status, {"url": f"{self.server.address}/{name}"})

    def branch(self, body, name, branch):
        self.server.repositories[name].setdefault(branch, {})
        self.send(200, {})

    def preupload(self, body, name, revision):
        modes = {"uploadMode": "regular", "shouldIgnore": False}
        self.send(200, {"files": [{"path": file["path"], **modes} for file in json.loads(body)["files"]]})

    def commit(self, body, name, revision):
        files = self.files(name, revision)
        for change in map(json.loads, body.splitlines()[1:]):
            path = change["value"]["path"]
            if change["key"] == "deletedFile":
                del files[path]
            else:
                files[path] = base64.b64decode(change["value"]["content"])
        commit = digest(revision)
        self.send(200, {"commitUrl": f"{self.server.address}/{name}/commit/{commit}", "commitOid": commit})

    def info(self, body, name, revision="main"):
        if self.files(name, revision) is None:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit = digest(revision) if revision in self.server.repositories[name] else revision
        return self.send(200, {"id": name, "sha": commit})

    def tree(self, body, name, revision):
        files = self.files(name, revision).items()
        self.send(200, [{"type": "file", "path": path, "size": len(data), "oid": digest(data)} for path, data in files])

    def resolve(self, body, name, revision, path):
        data = self.files(name, revision).get(path)
        if data is None:
            return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        commit = digest(revision) if revision in self.server.repositories[name] else revision
        return self.send(200, data, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": commit})


NAME, REVISION = r"([\w.-]+/[\w.-]+)", r"([\w-]+)"
ROUTES = {
    r"/?|/api/validate-yaml": Handler.welcome,
    r"/api/repos/create": Handler.create,
    rf"/api/models/{NAME}": Handler.info,
    rf"/api/models/{NAME}/revision/{REVISION}": Handler.info,
    rf"/api/models/{NAME}/branch/{REVISION}": Handler.branch,
    rf"/api/models/{NAME}/preupload/{REVISION}": Handler.preupload,
    rf"/api/models/{NAME}/commit/{REVISION}": Handler.commit,
    rf"/api/models/{NAME}/tree/{REVISION}": Handler.tree,
    rf"/{NAME}/resolve/{REVISION}/(.+)": Handler.resolve,
}


def digest(content: str | bytes) -> str:
    return hashlib.sha1(content if isinstance(content, bytes) else content.encode()).hexdigest()
