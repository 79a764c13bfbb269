"""The chart's pods in containers: `podman kube play` runs what deploy/manifests/splice.yaml says, under load, while every pod is
restarted in turn and the decode pool grows and shrinks. No request may fail.

Needs root, podman with runc, and the image that deploy/images/make.sh builds (./dev images does all of it); skipped without.
Podman has no StatefulSets, Services or HTTP probes: this test makes a pod of every replica, gives it the names that the chart's
Services would give it, asks the probes itself, and stands in for the router's Service, which sends connections to ready routers only
and none to one that is being stopped."""
import asyncio
import copy
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

import tools

tools.need("yaml")
if shutil.which("helm") is None and tools.CHART_PYTHON.exists():
    tools.need("helm_python")  # for one of the tests, which is skipped without
import yaml  # noqa: E402

sys.path.insert(0, str(tools.ROOT / "deploy" / "helm"))
import hub  # noqa: E402
import render  # noqa: E402

IMAGE = os.environ.get("SPLICE_TEST_IMAGE", "localhost/splice:0.1.0")
BIN = pathlib.Path(os.environ.get("SPLICE_BIN_DIR", tools.ROOT / "build" / "bin"))
KEY = "0123456789abcdef-test"
SMALLER = {"--kv-bytes": "192MiB", "--memory-bytes": "64MiB", "--disk-bytes": "256MiB", "--host-kv-bytes": "16MiB", "--backend": "cpu"}
NETWORK, SUBNET = "splice-test", "10.89.77"
ADDRESS = {"store": 20, "decode": 30, "prefill": 40, "router": 50}  # of a pool's first pod
METRICS = {"router": 9100, "prefill": 9101, "decode": 9102, "store": 9103}
# crun refuses cgroups of version 1.
PODMAN = ["podman", "--runtime", "runc"]
# Limits are those of the shell: in a virtual machine without CAP_SYS_RESOURCE none may be raised.
CONFIG = tempfile.NamedTemporaryFile("w", suffix=".conf")
CONFIG.write("[containers]\ndefault_ulimits = [" + ", ".join(
    f'"{name}={hard}:{hard}"' for name, hard in (("nofile", resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
                                                 ("nproc", min(4096, abs(resource.getrlimit(resource.RLIMIT_NPROC)[1]) or 4096)))) + "]\n")
CONFIG.flush()


def podman(*arguments, check=True, **more):
    done = subprocess.run([*PODMAN, *arguments], capture_output=True, text=True, env={**os.environ, "CONTAINERS_CONF": CONFIG.name}, **more)
    if check and done.returncode != 0:
        raise AssertionError(f"podman {' '.join(arguments)}: {done.stderr.strip()}")
    return done


if os.geteuid() != 0 or not shutil.which("podman") or not shutil.which("runc"):
    tools.skip("needs root, podman and runc")
if podman("image", "exists", IMAGE, check=False).returncode != 0:
    tools.skip(f"no image {IMAGE}: ./dev images builds it")


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


class Cluster:
    """The pods of the manifests, by (component, index)."""

    def __init__(self, folder, manifests=None):
        self.folder = pathlib.Path(folder)
        documents = tools.load_documents(manifests or (render.MANIFESTS / "splice.yaml").read_text())
        self.workloads = {d["metadata"]["name"].removeprefix("splice-"): d for d in documents if d["kind"] in ("Deployment", "StatefulSet")}
        self.names = self.service_names()
        auth = self.folder / "auth"
        auth.mkdir()
        (auth / "api-keys").write_text(f"{KEY} tester\n")
        (auth / "namespace-secret").write_text("a secret of 16 bytes or more")
        for path in (auth, *auth.iterdir()):
            os.chown(path, 10001, 10001)
        shutil.copytree(tools.ROOT / "models" / "splice-tiny", self.folder / "model")
        os.chmod(self.folder, 0o755)

    def service_names(self):
        """Address -> the names by which the chart's arguments call a pod."""
        names = {}
        text = json.dumps([w["spec"]["template"]["spec"] for w in self.workloads.values()])
        for name in set(re.findall(r"splice-(?:store|decode|prefill)-\d+\.[a-z.-]+", text)):
            component, index = re.match(r"splice-(\w+)-(\d+)\.", name).groups()
            names.setdefault(self.address(component, int(index)), []).append(name)
        return names

    @staticmethod
    def address(component, index):
        return f"{SUBNET}.{ADDRESS[component] + index}"

    def pod(self, component, index):
        spec = copy.deepcopy(self.workloads[component]["spec"]["template"]["spec"])
        name = f"splice-{component}-{index}"
        container = spec["containers"][0]
        container["image"] = IMAGE
        for unused in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "env", "ports"):
            container.pop(unused, None)
        container["resources"] = {}
        arguments = []
        for argument in container["args"]:
            flag, value = argument.split("=", 1)
            value = SMALLER.get(flag, value).replace("$(POD_IP)", self.address(component, index)).replace("$(POD_NAME)", name)
            arguments.append(f"{flag}={value}")
        container["args"] = arguments
        inits = spec.get("initContainers", [])
        for init in inits:
            init.update(image=IMAGE, resources={})
        volumes = []
        for volume in spec.get("volumes", []):
            where = {"model": "pulled" if inits else "model", "auth": "auth"}.get(volume["name"], f"{name}-{volume['name']}")
            volumes.append({"name": volume["name"], "hostPath": {"path": str(self.data(where))}})
        for claim in self.workloads[component]["spec"].get("volumeClaimTemplates", []):
            volumes.append({"name": claim["metadata"]["name"], "hostPath": {"path": str(self.data(f"{name}-{claim['metadata']['name']}"))}})
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "splice-test"}},
                "spec": {"initContainers": inits, "containers": [container], "volumes": volumes, "restartPolicy": "Never",
                         "securityContext": {k: spec["securityContext"][k] for k in ("runAsUser", "runAsGroup", "runAsNonRoot")},
                         "terminationGracePeriodSeconds": spec["terminationGracePeriodSeconds"],
                         "hostAliases": [{"ip": ip, "hostnames": hosts} for ip, hosts in self.names.items()]}}

    def data(self, name):
        path = self.folder / name
        if not path.exists():
            path.mkdir()
            os.chown(path, 10001, 10001)
        return path

    def start(self, component, index):
        pod = self.pod(component, index)
        path = self.folder / f"{pod['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(pod))
        # With a MAC of its own: under a new one its neighbours would look for it at the old one for half a minute.
        podman("kube", "play", "--network", NETWORK, "--ip", self.address(component, index), "--mac-address",
               f"02:00:00:00:00:{ADDRESS[component] + index:02x}", str(path))

    def stop(self, component, index):
        """Seconds until the pod has ended by itself."""
        name, grace = f"splice-{component}-{index}", self.workloads[component]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        begin = time.monotonic()
        # The container alone: a pod that is stopped loses its network while its programs still drain.
        podman("stop", "-t", str(grace), f"{name}-{component}")
        seconds = time.monotonic() - begin
        code = podman("inspect", "--format", "{{.State.ExitCode}}", f"{name}-{component}").stdout.strip()
        log = self.log(component, index, 4000)
        if "SPLICE_PODMAN_LOGS" in os.environ:
            (pathlib.Path(os.environ["SPLICE_PODMAN_LOGS"]) / f"{name}-stopped.log").write_text(log)
        podman("pod", "rm", "-f", name)
        if code != "0":
            raise AssertionError(f"{name} ended with {code} after {seconds:.1f} s:\n{log}")
        return seconds

    @staticmethod
    def log(component, index, lines=40):
        done = podman("logs", "--tail", str(lines), f"splice-{component}-{index}-{component}", check=False)
        return done.stdout + done.stderr

    def ready(self, component, index):
        return answers(f"http://{self.address(component, index)}:{METRICS[component]}/readyz")

    def wait_ready(self, component, index, seconds=60):
        begin = time.monotonic()
        while not self.ready(component, index):
            if time.monotonic() - begin > seconds:
                raise AssertionError(f"{component} {index} is not ready:\n" + self.log(component, index))
            time.sleep(0.1)
        return time.monotonic() - begin


class Service:
    """Forwards connections on a port of loopback to the routers that are ready and not leaving, in turn."""

    def __init__(self, targets):
        self.targets, self.leaving, self.turn = targets, set(), 0
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self.forward, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def forward(self, reader, writer):
        there = [t for t in self.targets if t not in self.leaving]
        self.turn += 1
        try:
            up_reader, up_writer = await asyncio.open_connection(there[self.turn % len(there)], 8000)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self.copy(reader, up_writer), self.copy(up_reader, writer))

    @staticmethod
    async def copy(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()


class Load:
    """`splice bench` again and again, four requests at a time, until stop()."""

    ROUND = 24

    def __init__(self, endpoint, report):
        self.command = [str(BIN / "splice"), "bench", "--endpoint", endpoint, "--concurrency", "4", "--num-requests", str(self.ROUND),
                        "--input-tokens", "300", "--output-tokens", "24", "--timeout-s", "60", "--json", str(report)]
        self.report, self.requests, self.failed, self.ttft_p99, self.itl_p99, self.output = report, 0, 0, 0.0, 0.0, ""
        self.stopping, self.round_over = threading.Event(), threading.Condition()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        seed = 0
        while not self.stopping.is_set():
            seed += 1
            done = subprocess.run([*self.command, "--seed", str(seed)], env={**os.environ, "SPLICE_API_KEY": KEY}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            result = json.loads(self.report.read_text()) if self.report.exists() else {}
            with self.round_over:
                self.requests += self.ROUND
                self.round_over.notify_all()
            self.failed += result.get("requests", {}).get("failed", self.ROUND)
            self.ttft_p99 = max(self.ttft_p99, result.get("ttft_ms", {}).get("p99", 0) / 1e3)
            self.itl_p99 = max(self.itl_p99, result.get("itl_ms", {}).get("p99", 0) / 1e3)
            if done.returncode != 0 or result.get("errors"):
                self.output += f"{done.stdout[-1500:]}\n{result.get('errors')}\n"

    def wait_for_a_round(self, seconds=90):
        """Until a round that ends after this call has ended."""
        with self.round_over:
            before = self.requests
            if not self.round_over.wait_for(lambda: self.requests > before, seconds):
                raise AssertionError(f"no round of {self.ROUND} requests ended within {seconds} s")

    def stop(self):
        self.stopping.set()
        self.thread.join()


class PodmanTest(unittest.TestCase):
    def setUp(self):
        podman("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)
        self.addCleanup(podman, "network", "rm", "-f", NETWORK, check=False)
        self.addCleanup(lambda: podman("pod", "rm", "-f", "-a", "--filter", "label=app=splice-test", check=False))
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.cluster = Cluster(folder.name)

    def test_the_image_has_no_more_than_it_needs(self):
        inspected = json.loads(podman("image", "inspect", IMAGE).stdout)[0]
        self.assertEqual(inspected["Config"]["User"], "10001:10001")
        look = ["run", "--rm", "--network=none", "--read-only", "--user=0", IMAGE, "busybox"]
        self.assertEqual(podman(*look, "find", "/", "-xdev", "-type", "f", "-perm", "/6000").stdout.strip(), "", "files that change their user")
        # Of the image's user, or writable for all.
        own = podman(*look, "find", "/", "-xdev", "(", "-user", "10001", "-o", "(", "!", "-type", "l", "-perm", "-0002", ")", ")").stdout.split()
        self.assertEqual(sorted(set(own) - {"/tmp", "/var/tmp", "/dev/null"}), ["/var/lib/splice"])
        contents = podman("run", "--rm", "--network=none", IMAGE, "busybox", "cat", "/usr/share/splice/contents.txt").stdout
        self.assertRegex(contents, r"(?m)^libc6 2|^# on top of ", "it says which packages it is made of")
        for program in ("apt", "dpkg", "bash", "perl", "python3", "curl", "wget", "su", "mount"):
            self.assertNotEqual(podman("run", "--rm", "--network=none", IMAGE, "busybox", "which", program, check=False).returncode, 0, program)

    def test_the_init_container_fetches_the_model(self):
        server = hub.Hub("acme/ships", tools.ROOT / "models" / "splice-tiny", host="0.0.0.0")
        self.addCleanup(server.close)
        # The network's gateway is this machine.
        url = f"http://{SUBNET}.1:{server.server.server_address[1]}"
        claim = {"persistentVolumeClaim": {"claimName": "models", "readOnly": False}}
        try:
            texts = render.render(values={"model": {"pull": "acme/ships", "hub": url, "volume": claim}})
        except render.NoRenderer as why:
            self.skipTest(str(why))
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        cluster = Cluster(folder.name, "".join("---\n" + text for text in texts))
        begin = time.monotonic()
        for component, index in (("prefill", 0), ("prefill", 1)):
            cluster.start(component, index)
            cluster.wait_ready(component, index)
            print(f"{component} {index}: ready {time.monotonic() - begin:.1f} s after the first start, with an init container", file=sys.stderr)
        self.assertEqual(sum(path.endswith("/model-00001-of-00003.safetensors") for path in server.requests), 1, "the second pod finds it there")
        pulled = cluster.folder / "pulled" / "model-00003-of-00003.safetensors"
        self.assertEqual(pulled.read_bytes(), server.files["model-00003-of-00003.safetensors"])
        self.assertEqual(pulled.stat().st_uid, 10001)

    def test_nothing_is_lost_while_pods_come_and_go(self):
        cluster, routers = self.cluster, 2
        begin = time.monotonic()
        pods = [(c, i) for c in ("store", "decode", "prefill", "router") for i in range(2)]
        for component, index in pods:
            cluster.start(component, index)
        for component, index in pods:
            cluster.wait_ready(component, index)
        print(f"8 pods ready after {time.monotonic() - begin:.1f} s", file=sys.stderr)
        self.service = Service([cluster.address("router", i) for i in range(routers)])
        load = Load(f"http://127.0.0.1:{self.service.port}", pathlib.Path(cluster.folder) / "bench.json")
        self.addCleanup(load.stop)
        load.wait_for_a_round()  # there is load before the first restart
        restarts = 0
        for component, index in [("decode", 1), *pods]:
            if component == "router":
                self.service.leaving.add(cluster.address(component, index))
                load.wait_for_a_round()  # in place of the chart's preStop: open connections end, new ones go elsewhere
            stopped = cluster.stop(component, index)
            cluster.start(component, index)
            ready = cluster.wait_ready(component, index)
            self.service.leaving.discard(cluster.address(component, index))
            restarts += 1
            print(f"{component} {index}: ended {stopped:.1f} s after SIGTERM, ready {ready:.1f} s after its start", file=sys.stderr)
            load.wait_for_a_round()
        load.stop()
        if load.failed > 0 and "SPLICE_PODMAN_LOGS" in os.environ:
            for component, index in pods:
                (pathlib.Path(os.environ["SPLICE_PODMAN_LOGS"]) / f"{component}-{index}.log").write_text(cluster.log(component, index, 4000))
        print(f"{restarts} restarts, {load.requests} requests, {load.failed} failed; p99 of the rounds, worst: first token "
              f"{load.ttft_p99:.3f} s, between tokens {load.itl_p99:.3f} s", file=sys.stderr)
        self.assertGreater(load.requests, 50)
        self.assertEqual(load.failed, 0, load.output[-3000:])


if __name__ == "__main__":
    unittest.main()
