"""A hub of models for tests of the chart: the list of a repository's files and the files, as a Hugging Face hub answers. Its C++ sister,
tests/support/hub_server.h, also breaks and refuses."""
import hashlib
import http.server
import json
import pathlib
import threading

REVISION = "0123456789abcdef0123456789abcdef01234567"


def is_lfs(name):
    return name.endswith(".safetensors") or name == "tokenizer.json"


def digest(name, content):
    """What the hub calls the ETag: SHA-256 of files in LFS, Git's blob id of the others."""
    if is_lfs(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """Serves the files of `folder` as `repository` until close(). `requests` are the paths that were asked for."""

    def __init__(self, repository, folder, host="127.0.0.1"):
        self.repository, self.requests = repository, []
        self.files = {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir() if path.is_file()}
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.requests.append(self.path)
                status, body, etag = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if etag:
                    self.send_header("ETag", f'"{etag}"')
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path):
        """(status, body, ETag)"""
        if path == f"/api/models/{self.repository}/revision/main":
            siblings = [{"rfilename": name, "size": len(content), "blobId": digest(name, content),
                         **({"lfs": {"sha256": digest(name, content), "size": len(content)}} if is_lfs(name) else {})}
                        for name, content in self.files.items()]
            return 200, json.dumps({"sha": REVISION, "siblings": siblings}).encode(), ""
        name = path.removeprefix(f"/{self.repository}/resolve/{REVISION}/")
        if name in self.files:
            return 200, self.files[name], digest(name, self.files[name])
        return 404, b"", ""

    def close(self):
        self.server.shutdown()
        self.server.server_close()
