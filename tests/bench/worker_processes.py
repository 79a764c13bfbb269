"""Processes of a cluster on this machine, for benchmarks that are scripts."""
import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request

MODEL = "models/splice-tiny"


class Program:
    def __init__(self, *argv, stdin=None):
        self.process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.process.stdout:
            if line.startswith("ready "):
                self.ready = dict(pair.split("=", 1) for pair in line.split()[1:])
                return
        raise RuntimeError(f"{argv[0]} did not start")

    def stop(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def cluster(bin_dir, prefill_program, prefill_flags, decode_flags):
    """Router, prefill and decode worker; yields their ready lines."""
    programs = []
    try:
        worker = ["--model", MODEL, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
        programs.append(Program(prefill_program, *worker, *prefill_flags))
        programs.append(Program(f"{bin_dir}/splice-decode", *worker, *decode_flags))
        prefill, decode = (program.ready for program in programs)
        programs.append(Program(f"{bin_dir}/splice-router", "--prefill", prefill["grpc"], "--decode", decode["grpc"], "--http",
                                "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--insecure-open", "--model", MODEL))
        yield programs[2].ready, prefill, decode
    finally:
        for program in reversed(programs):
            program.stop()


def complete(http, ids, tokens, **fields):
    """The answer to a prompt of token ids, and how long it took; waits for a router that knows no worker yet."""
    return post(http, "completions", {"prompt": ids, **fields}, tokens)


def chat(http, parts, tokens, **fields):
    """The same for a user's message of these parts."""
    return post(http, "chat/completions", {"messages": [{"role": "user", "content": parts}], **fields}, tokens)


def post(http, path, fields, tokens):
    body = json.dumps({"max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"http://{http}/v1/{path}", body, {"Content-Type": "application/json"})
    for _ in range(200):
        start = time.monotonic()
        try:
            with urllib.request.urlopen(request) as reply:
                return json.load(reply), time.monotonic() - start
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise RuntimeError(error.read().decode()) from error
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.1)
    raise RuntimeError("no answer")
