"""The pods of deploy/manifests as processes: the commands start, answer their probes, serve an authenticated request, export the
metrics of docs/metrics.md, and end within their grace period. One pod of each kind, on loopback, with splice-tiny."""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

import tools

tools.need("yaml")
if shutil.which("helm") is None and tools.CHART_PYTHON.exists():
    tools.need("helm_python")  # for one of the tests, which is skipped without
sys.path.insert(0, str(tools.ROOT / "deploy" / "helm"))
import hub  # noqa: E402
import metrics  # noqa: E402
import render  # noqa: E402

BIN = pathlib.Path(os.environ.get("SPLICE_BIN_DIR", tools.ROOT / "build" / "bin"))
ORDER = ["store", "decode", "prefill", "router"]
KEY = "0123456789abcdef-test"
# What a test machine has less of than a node.
SMALLER = {"--kv-bytes": "64MiB", "--memory-bytes": "64MiB", "--disk-bytes": "256MiB"}

if not all((BIN / f"splice-{p}").exists() for p in ("router", "prefill", "decode", "kvstore")):
    tools.skip(f"the programs are not in {BIN}")


def free_port():
    """Below the ports that the system gives to outgoing connections, so that none of those takes it before its pod does."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def get(url, key=None, body=None, timeout=30):
    """(status, text) of a request."""
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class PodsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        documents = tools.load_documents((render.MANIFESTS / "splice.yaml").read_text())
        cls.pods = {d["metadata"]["name"].removeprefix("splice-"): d["spec"]["template"]["spec"]
                    for d in documents if d["kind"] in ("Deployment", "StatefulSet")}
        cls.folder = tempfile.TemporaryDirectory()
        auth = pathlib.Path(cls.folder.name) / "auth"
        auth.mkdir()
        (auth / "api-keys").write_text(f"{KEY} tester\n")
        (auth / "namespace-secret").write_text("a secret of 16 bytes or more")
        cls.ports, cls.processes = {}, {}
        for name in ORDER:
            cls.start(name)

    @classmethod
    def local_port(cls, port):
        if str(port) not in cls.ports:
            cls.ports[str(port)] = next(p for p in iter(free_port, None) if p not in cls.ports.values())
        return cls.ports[str(port)]

    @classmethod
    def start(cls, name, *more):
        container = cls.pods[name]["containers"][0]
        command = [str(BIN / container["command"][0])]
        for argument in container["args"]:
            flag, value = argument.split("=", 1)
            if flag in ("--prefill", "--decode", "--store"):  # the first pod of each pool
                value = f"127.0.0.1:{cls.local_port(value.split(',')[0].rsplit(':', 1)[1])}"
            elif flag in ("--listen", "--metrics-listen", "--http", "--grpc"):
                value = f"127.0.0.1:{cls.local_port(value.rsplit(':', 1)[1])}"
            value = value.replace("$(POD_IP)", "127.0.0.1").replace("$(POD_NAME)", f"splice-{name}-0")
            value = value.replace("/models/model", "models/splice-tiny").replace("/etc/splice", cls.folder.name)
            value = value.replace("/var/lib/splice", cls.folder.name)
            if value == "auto" and flag == "--backend":
                value = "cpu"
            command.append(f"{flag}={SMALLER.get(flag, value)}")
        command += more
        with open(pathlib.Path(cls.folder.name) / f"{name}.log", "w") as log:
            cls.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=tools.ROOT)

    @classmethod
    def tearDownClass(cls):
        for process in cls.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        cls.folder.cleanup()

    def metrics_url(self, name):
        ports = {p["name"]: p["containerPort"] for p in self.pods[name]["containers"][0]["ports"]}
        return f"http://127.0.0.1:{self.ports[str(ports['metrics'])]}"

    def wait_ready(self, name):
        deadline = time.monotonic() + 60
        while get(self.metrics_url(name) + "/readyz")[0] != 200:
            code = self.processes[name].poll()
            log = (pathlib.Path(self.folder.name) / f"{name}.log").read_text()[-2000:]
            self.assertIsNone(code, f"{name} ended with {code}:\n{log}")
            self.assertLess(time.monotonic(), deadline, f"{name} did not become ready:\n{log}")
            time.sleep(0.1)

    def check_exported(self, name, local_prefill):
        table = metrics.read_table()
        status, text = get(self.metrics_url(name) + "/metrics")
        self.assertEqual(status, 200, text)
        exported = dict(re.findall(r"^# TYPE (splice_\w+) (\w+)$", text, re.MULTILINE))
        self.assertGreater(len(exported), 10, name)
        wrong = {metric for metric, kind in exported.items()
                 if metric not in table or table[metric].type != kind or name not in table[metric].programs}
        self.assertEqual(wrong, set(), f"{name} exports it, and the table has another type or program")
        # What the table says is there from the start: all but events that this test has not caused.
        # Spans are counted where they are exported, and these pods have no collector.
        # And what only a plan sets: an autoscaler must not read a 0 before there is one.
        events = {"splice_request_errors_total", "splice_trace_spans_total", "splice_pool_desired_replicas",
                  "splice_pool_desired_reason", "splice_prefill_choices_total"} | {m for m in table if m.startswith("splice_fidelity_")}
        own = {m for m, row in table.items() if name in row.programs}
        if name == "decode":
            only_local = {m for m in own if table[m].local_prefill}
            if local_prefill:  # its pods are given no store
                own -= {m for m in own if m.startswith("splice_store_")}
            else:
                self.assertEqual(only_local & set(exported), set(), "these came without --local-prefill-tokens")
                own -= only_local
        self.assertEqual(own - set(exported) - events, set(), f"{name} does not export it")

    def test_the_init_container_fetches_the_model(self):
        """model.pull: what the init container of each pod runs fills the folder once, and the program loads it."""
        server = hub.Hub("acme/ships", tools.ROOT / "models" / "splice-tiny")
        self.addCleanup(server.close)
        claim = {"persistentVolumeClaim": {"claimName": "models", "readOnly": False}}
        try:
            texts = render.render(values={"model": {"pull": "acme/ships", "hub": server.url, "volume": claim}})
        except render.NoRenderer as why:
            self.skipTest(str(why))
        model = pathlib.Path(self.folder.name) / "pulled"
        pods = {d["metadata"]["name"].removeprefix("splice-"): d["spec"]["template"]["spec"]
                for d in tools.load_documents("".join("---\n" + text for text in texts)) if d["kind"] in ("Deployment", "StatefulSet")}
        inits = {name: pod["initContainers"][0] for name, pod in pods.items() if "initContainers" in pod}
        self.assertEqual(set(inits), {"router", "prefill", "decode"})
        for name, init in inits.items():
            arguments = [a.replace("/models/model", str(model)) for a in init["args"]]
            done = subprocess.run([BIN / init["command"][0], *init["command"][1:], *arguments], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 0, f"{name}: {done.stderr}")
        fetched = [path for path in server.requests if path.endswith("/model-00001-of-00003.safetensors")]
        self.assertEqual(len(fetched), 1, "the other pods find it there")
        for file in ("config.json", "tokenizer.json", "model-00003-of-00003.safetensors"):
            self.assertEqual((model / file).read_bytes(), server.files[file], file)
        # A model that is not there keeps the pod from starting, and says why.
        wrong = [a.replace("/models/model", str(model) + "-2").replace("acme/ships", "acme/none") for a in inits["prefill"]["args"]]
        done = subprocess.run([BIN / "splice", "pull", *wrong], capture_output=True, text=True, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("acme/none does not exist", done.stderr)
        with open(pathlib.Path(self.folder.name) / "pulled.log", "w+") as log:
            worker = subprocess.Popen([BIN / "splice-prefill", "--model", model, "--backend", "cpu", "--kv-bytes", "64MiB"],
                                      stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                line = worker.stdout.readline()
                log.seek(0)
                self.assertTrue(line.startswith("ready grpc="), line + log.read())
            finally:
                worker.kill()
                worker.wait()
                worker.stdout.close()

    def test_they_serve_and_end(self):
        for name in ORDER:
            self.wait_ready(name)
            self.assertEqual(get(self.metrics_url(name) + "/healthz")[0], 200)

        router = f"http://127.0.0.1:{self.ports['8000']}/v1/completions"
        body = {"prompt": "The capital of", "max_tokens": 8, "temperature": 0}
        self.assertEqual(get(router, body=body)[0], 401)
        status, text = get(router, key=KEY, body=body)
        self.assertEqual(status, 200, text)
        self.assertEqual(json.loads(text)["splice"]["workers"],
                         {"prefill": "splice-prefill-0", "decode": "splice-decode-0"})

        for name in ORDER:
            self.check_exported(name, local_prefill=False)

        # What the alert SplicePagesLeaked takes for a leak: a decode worker without requests that holds pages.
        deadline = time.monotonic() + 10
        while not re.search(r"^splice_kv_pages_used 0$", get(self.metrics_url("decode") + "/metrics")[1], re.MULTILINE):
            self.assertLess(time.monotonic(), deadline, "the decode worker keeps pages of a finished request")
            time.sleep(0.1)

        for name in reversed(ORDER):
            process, begin = self.processes[name], time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=self.pods[name]["terminationGracePeriodSeconds"])
            self.assertEqual(code, 0, (pathlib.Path(self.folder.name) / f"{name}.log").read_text()[-2000:])
            print(f"{name} ended {time.monotonic() - begin:.1f} s after SIGTERM", file=sys.stderr)

        self.start("decode", "--local-prefill-tokens=256", "--vllm-metric-names=true",
                   "--served-model-name=mine")
        self.wait_ready("decode")
        self.check_exported("decode", local_prefill=True)
        text = get(self.metrics_url("decode") + "/metrics")[1]
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
            self.assertIn(f'vllm:{name}{{model_name="mine"}} ', text)


if __name__ == "__main__":
    unittest.main()
