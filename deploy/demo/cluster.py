"""The programs of a cluster on this machine, each with free ports on loopback, and requests to its router."""
import http.client
import json
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

READY_SECONDS = 120
ANSWER_SECONDS = 300  # without a word from the router
END_SECONDS = 5


class Program:
    """One program, from its start to its end. Its standard output says "ready key=value …" when it serves."""

    def __init__(self, folder, name, command):
        self.name = name
        self.killed = False
        self.output, self.log = folder / f"{name}.out", folder / f"{name}.log"
        with self.output.open("wb") as output, self.log.open("wb") as log:
            self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=output, stderr=log)

    def ready(self):
        """The addresses that the program serves at, by their key; waits for them."""
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            for line in self.output.read_text().splitlines():
                if line.startswith("ready "):
                    return dict(word.split("=", 1) for word in line.split()[1:])
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with status {self.process.returncode}:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} was not ready after {READY_SECONDS} s:\n{self.log.read_text()[-2000:]}")

    def kill(self):
        """As a machine that loses its power would: no goodbye."""
        self.process.kill()
        self.process.wait()
        self.killed = True

    def end_by_itself(self):
        """How it ended and the end of its log, if nobody stopped it; else None."""
        status = self.process.poll()
        if status is None or self.killed:
            return None
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} {how}:\n{self.log.read_text(errors='replace')[-2000:]}"


class Cluster:
    """A store, a prefill worker, two decode workers and a router. A context: nothing of it is left behind."""

    def __init__(self, binaries, model):
        self.binaries, self.model = pathlib.Path(binaries), model
        self.programs = {}
        self.address = None  # of the router's HTTP port: "127.0.0.1:PORT"
        self.ended = []  # programs that had ended by themselves when an error ended the context, with the ends of their logs

    def __enter__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="splice-demo-"))
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, _kind=None, error=None, _trace=None):
        if isinstance(error, (OSError, RuntimeError)):
            self.ended = [end for end in map(Program.end_by_itself, self.programs.values()) if end]
        for program in self.programs.values():
            program.process.terminate()
        end = time.monotonic() + END_SECONDS
        for program in self.programs.values():
            try:
                program.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self):
        store = self.run("store", "splice-kvstore", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
                         "--data-dir", self.folder / "chunks")
        worker = ("--model", self.model, "--kv-bytes", "512MiB")
        decode = [self.run(name, "splice-decode", *worker, "--worker-id", name) for name in ("decode-0", "decode-1")]
        prefill = self.run("prefill-0", "splice-prefill", *worker, "--worker-id", "prefill-0", "--store", store.ready()["grpc"])
        # The model was trained with <|seg|> in front of each document.
        router = self.run("router", "splice-router", "--model", self.model, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
                          "--special-tokens-in-text", "--drain-timeout-ms", 500, "--prefill", prefill.ready()["grpc"],
                          "--decode", ",".join(worker.ready()["grpc"] for worker in decode))
        self.address = router.ready()["http"]
        self.wait_for_workers()

    def run(self, name, program, *flags):
        self.programs[name] = Program(self.folder, name, (self.binaries / program, *flags))
        return self.programs[name]

    def wait_for_workers(self):
        """Until the prefill worker has connections to both decode workers."""
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            links = [link for worker in self.get("/control/v1/workers")["data"] for link in worker.get("links", [])]
            if len(links) == 2:
                return
            time.sleep(0.02)
        raise RuntimeError(f"the prefill worker had no connection to both decode workers after {READY_SECONDS} s")

    def get(self, path):
        with self.send("GET", path, None) as answer:
            return json.load(answer)

    def ask(self, body, on_text=None):
        """(text, receipt) of a chat request, which is streamed. on_text(text so far) is called as it grows."""
        text, receipt = "", None
        with self.send("POST", "/v1/chat/completions", {**body, "stream": True}) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: "):])
                if "error" in event:
                    raise RuntimeError(f"the stream broke behind {text!r}: {event['error']['message']}")
                receipt = event.get("splice") or receipt
                delta = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if delta:
                    text += delta
                    if on_text:
                        on_text(text)
        if receipt is None:
            raise RuntimeError(f"the stream ended without a receipt behind {text!r}")
        return text, receipt

    def send(self, method, path, body):
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_SECONDS)
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.read().decode()}")
        return answer
