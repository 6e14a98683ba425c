"""A server on loopback that answers as the hub of Hugging Face does, to what its packages ask: models and data sets, branches, gates,
parts of files. It cuts connections off, and stands still, when it is told to."""
import hashlib
import http.server
import json
import threading
import urllib.parse


def commit_of(files):
    """Name of a commit with these files: 40 hexadecimal digits."""
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


class Repository:
    """Files of a model or data set. `gate`: status of whoever asks for a file (401, 403), or None."""

    def __init__(self, files, gate=None, branches=("main",)):
        self.files, self.gate, self.branches = files, gate, branches
        self.commit = commit_of(files)

    def has(self, revision):
        return revision == self.commit or revision in self.branches


class Hub(http.server.ThreadingHTTPServer):
    """The server. `repositories`: by kind and name, such as ("models", "org/name"). `asked`: methods, paths and ranges of files asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories, self.asked = {}, []
        self.cut_at, self.cuts = None, 0  # bytes after which the connection is cut off, and how often still
        self.stand_at = None  # bytes after which a file stops coming
        self.standing = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files_asked(self, method="GET"):
        return [path.rpartition("/")[2] for each, path, _ in self.asked if each == method]

    def stop(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """A client that goes away is no fault."""


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        kind, name, rest = self.parsed()
        repository = self.server.repositories.get((kind, name))
        if repository is None or not rest.startswith("paths-info/"):
            return self.refuse(404, "RepoNotFound" if repository is None else "EntryNotFound")
        if "json" in self.headers.get("Content-Type", ""):
            paths = json.loads(body)["paths"]
        else:
            paths = urllib.parse.parse_qs(body.decode())["paths"]
        return self.say([self.entry(repository, path) for path in paths if path in repository.files])

    def do_GET(self):
        kind, name, rest = self.parsed()
        repository = self.server.repositories.get((kind, name))
        if repository is None:
            return self.refuse(401, "RepoNotFound")
        if not self.path.startswith("/api/"):
            return self.file(repository, rest)
        what, _, more = rest.partition("/")
        if what == "refs":
            refs = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": repository.commit} for name in repository.branches]
            return self.say({"branches": refs, "converts": [], "tags": []})
        revision = urllib.parse.unquote(more.partition("/")[0]) or "main"
        if not repository.has(revision):
            return self.refuse(404, "RevisionNotFound")
        if what == "tree":
            return self.tree(repository, more.partition("/")[2])
        files = [{"rfilename": path, "size": len(content)} for path, content in repository.files.items()]
        return self.say({"id": name, "_id": name, "sha": repository.commit, "private": False, "gated": "manual" if repository.gate else False,
                         "tags": [], "downloads": 0, "likes": 0, "siblings": files, "lastModified": "2026-01-01T00:00:00.000Z"})

    def parsed(self):
        """Kind, name and the rest of the path."""
        parts = urllib.parse.urlsplit(self.path).path.strip("/").split("/")
        if parts[0] == "api":
            return parts[1], "/".join(parts[2:4]), "/".join(parts[4:])
        if parts[0] == "datasets":
            return "datasets", "/".join(parts[1:3]), "/".join(parts[3:])
        return "models", "/".join(parts[:2]), "/".join(parts[2:])

    @staticmethod
    def entry(repository, path):
        return {"type": "file", "path": path, "size": len(repository.files[path]),
                "oid": hashlib.sha1(repository.files[path]).hexdigest()}

    def tree(self, repository, under):
        recursive = "recursive=true" in self.path.lower()
        begin = under + "/" if under else ""
        files = [path for path in repository.files if path.startswith(begin)]
        if under and not files:
            return self.refuse(404, "EntryNotFound")
        entries = [self.entry(repository, path) for path in files if recursive or "/" not in path[len(begin):]]
        folders = sorted({begin + path[len(begin):].split("/")[0] for path in files if "/" in path[len(begin):]})
        entries += [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders]
        return self.say(entries)

    def file(self, repository, rest):
        self.server.asked.append((self.command, self.path, self.headers.get("Range")))
        _, _, more = rest.partition("/")
        revision, _, path = map(urllib.parse.unquote, more.partition("/"))
        if repository.gate:
            return self.refuse(repository.gate, "GatedRepo")
        if not repository.has(revision):
            return self.refuse(404, "RevisionNotFound")
        if path not in repository.files:
            return self.refuse(404, "EntryNotFound")
        content, status, headers = repository.files[path], 200, {}
        begin = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
        if begin:
            status, whole = 206, len(content)
            content = content[int(begin):]
            headers["Content-Range"] = f"bytes {begin}-{whole - 1}/{whole}"
        return self.send(status, content, {**headers, "ETag": f'"{self.entry(repository, path)["oid"]}"', "X-Repo-Commit": repository.commit,
                                           "Accept-Ranges": "bytes"})

    def refuse(self, status, code):
        return self.send(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, "X-Error-Message": code})

    def say(self, value):
        return self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status, content, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        server, is_file = self.server, "ETag" in headers
        if is_file and server.stand_at is not None and len(content) > server.stand_at:
            self.wfile.write(content[:server.stand_at])
            self.wfile.flush()
            server.standing.set()
            threading.Event().wait(20)
        elif is_file and server.cuts > 0 and len(content) > server.cut_at:
            server.cuts -= 1
            self.wfile.write(content[:server.cut_at])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
        else:
            self.wfile.write(content)
