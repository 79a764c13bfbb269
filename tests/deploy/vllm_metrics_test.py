"""--vllm-metric-names: a router under load says the same under both names, at every scrape. `splice serve` with splice-tiny."""
import json
import os
import pathlib
import re
import subprocess
import threading
import unittest
import urllib.request

import metrics
import tools

BIN = pathlib.Path(os.environ.get("SPLICE_BIN_DIR", tools.ROOT / "build" / "bin"))
SPLICE = BIN / "splice"
CLIENTS, REQUESTS = 4, 6
PROGRAMS = ["router", "decode", "prefill", "store"]

if not SPLICE.exists():
    tools.skip(f"no splice in {BIN}")


def call(url, body=None):
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def series(text):
    """{(name, labels without model_name): value} of a scrape, and the values of model_name."""
    found, models = {}, set()
    for name, labels, value in re.findall(r"^([a-z0-9_:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if name.startswith("vllm:"):
            models.add(pairs.pop("model_name", None))
        found[name, tuple(sorted(pairs.items()))] = float(value)
    return found, models


def of_first_program(found):
    """Own series without the label component, as the first of the programs that has the name says it."""
    programs = {}
    for (name, labels), _ in found.items():
        component = dict(labels).get("component")
        if component in PROGRAMS:
            programs[name] = min(programs.get(name, len(PROGRAMS)), PROGRAMS.index(component))
    return {(name, tuple(pair for pair in labels if pair[0] != "component")): value for (name, labels), value in found.items()
            if name in programs and dict(labels)["component"] == PROGRAMS[programs[name]]}


class VllmMetricsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        command = [str(SPLICE), "serve", "--model", "models/splice-tiny", "--backend", "cpu", "--http", "127.0.0.1:0", "--grpc",
                   "127.0.0.1:0", "--kv-bytes", "256MiB", "--store-memory-bytes", "64MiB", "--vllm-metric-names"]
        cls.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tools.ROOT)
        ready = next((line for line in cls.process.stdout if line.startswith("ready ")), "")
        cls.url = re.search(r"http=(\S+)", ready).group(1)
        if "://" not in cls.url:
            cls.url = "http://" + cls.url

    @classmethod
    def tearDownClass(cls):
        cls.process.terminate()
        cls.process.wait()
        cls.process.stdout.close()

    def compare(self, text):
        """Returns how many series were compared."""
        found, models = series(text)
        self.assertEqual(models, {"splice-tiny"})
        own_series = of_first_program(found)
        compared = 0
        for vllm, own in metrics.read_vllm_table().items():
            if own == "splice_reuse_tokens_total":
                kinds = {dict(labels)["kind"]: v for (name, labels), v in own_series.items() if name == own}
                want = sum(v for kind, v in kinds.items() if kind != "miss" or "queries" in vllm)
                self.assertEqual(found[vllm, ()], want, vllm)
                compared += 1
                continue
            for (name, labels), value in own_series.items():
                if name == own or name in {f"{own}_{suffix}" for suffix in ("bucket", "sum", "count")}:
                    self.assertEqual(found[name.replace(own, vllm), labels], value, vllm)
                    compared += 1
        return compared

    def test_a_router_under_load(self):
        failures = []

        def client(number):
            try:
                for i in range(REQUESTS):
                    call(self.url + "/v1/completions", {"prompt": f"The capital of country {number % 2} is, number {i}, and so " * 8,
                                                        "max_tokens": 12, "temperature": 0, "stream": i % 2 == 0})
            except Exception as error:  # for the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        scrapes = running = 0
        while any(thread.is_alive() for thread in threads):
            text = call(self.url + "/metrics")
            self.assertGreater(self.compare(text), 50)
            scrapes += 1
            running = max(running, series(text)[0]["vllm:num_requests_running", ()])
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertGreater(scrapes, 3)
        self.assertGreater(running, 0, "no scrape saw a request")

        text = call(self.url + "/metrics")
        self.compare(text)
        found, _ = series(text)
        self.assertEqual(sum(v for (name, _), v in found.items() if name == "vllm:request_success_total"), CLIENTS * REQUESTS)
        self.assertEqual(found["vllm:e2e_request_latency_seconds_count", ()], CLIENTS * REQUESTS)
        self.assertGreater(found["vllm:prefix_cache_hits_total", ()], 0)
        self.assertLess(found["vllm:prefix_cache_hits_total", ()], found["vllm:prefix_cache_queries_total", ()])
        # The page has every program.
        self.assertEqual({dict(labels)["component"] for (name, labels) in found if name.startswith("splice_")}, set(PROGRAMS))
        self.assertGreater(found["splice_pass_tokens_sum", (("component", "decode"), ("work", "decode"))], 0)
        self.assertIn(("vllm:kv_cache_usage_perc", ()), found)
        # The page of every program has each own name at most once, and no name twice.
        types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        self.assertEqual(len(types), len(set(types)))


if __name__ == "__main__":
    unittest.main()
