"""deploy/kind: what can be said of it without kind. Its values render, its objects are valid and fit together, and up.sh, run with
programs that write down how they were called, does things in order and fails when a request fails."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import tools

tools.need("yaml")
if shutil.which("helm") is None:
    tools.need("helm_python")
sys.path.insert(0, str(tools.ROOT / "deploy" / "helm"))
import render  # noqa: E402

KIND = tools.ROOT / "deploy" / "kind"
SPLICE = pathlib.Path(os.environ.get("SPLICE_BIN_DIR", tools.ROOT / "build" / "bin")) / "splice"
# Answers of the tools that up.sh reads.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
  kubectl*" logs "*) echo "$BENCH_LOG" ;;
  kubectl*" apply "*) cat >/dev/null ;;
  kubectl*"get job/"*) echo 1 ;;
esac
"""


def job():
    text = (KIND / "bench.yaml").read_text().replace("NAME", "bench").replace("LOAD", "rate=4").replace("REQUESTS", "64")
    document, = tools.load_documents(text)
    return document


def rendered():
    return tools.load_documents("".join("---\n" + text for text in render.render(KIND / "values.yaml")))


class KindTest(unittest.TestCase):
    def test_objects_are_valid(self):
        try:
            import kubernetes_validate
        except ImportError:
            self.skipTest("kubernetes_validate is not installed")
        for document in [job(), *rendered()]:
            kubernetes_validate.validate(document, "1.31.0", strict=True)

    def test_the_client_is_let_in_and_calls_what_there_is(self):
        pod = job()["spec"]["template"]
        documents = rendered()
        policy = next(d for d in documents if d["kind"] == "NetworkPolicy" and d["metadata"]["name"] == "splice-router")
        clients = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        self.assertLessEqual(clients.items(), pod["metadata"]["labels"].items())
        flags = dict(a.split("=", 1) for a in pod["spec"]["containers"][0]["args"])
        service = next(d for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == "splice-router")
        http = next(p["port"] for p in service["spec"]["ports"] if p["name"] == "http")
        self.assertEqual(flags["--endpoint"], f"http://splice-router:{http}")
        images = {c["image"] for d in documents if d["kind"] in ("Deployment", "StatefulSet")
                  for c in d["spec"]["template"]["spec"]["containers"]}
        self.assertEqual(images, {pod["spec"]["containers"][0]["image"]})
        script = (KIND / "up.sh").read_text()
        self.assertIn(images.pop(), script)
        # The model's folder is where up.sh mounts it into the nodes.
        volumes = [v["hostPath"]["path"] for d in documents if d["kind"] in ("Deployment", "StatefulSet")
                   for v in d["spec"]["template"]["spec"].get("volumes", []) if "hostPath" in v]
        self.assertEqual(set(volumes), {re.search(r"containerPath: (\S+),", script).group(1)})

    def test_bench_has_the_options(self):
        if not SPLICE.exists():
            self.skipTest(f"no splice in {SPLICE.parent}")
        text = subprocess.run([SPLICE, "bench", "--help"], capture_output=True, text=True).stdout
        for argument in job()["spec"]["template"]["spec"]["containers"][0]["args"] + ["--concurrency=8"]:
            self.assertIn(f"  {argument.split('=')[0]} ", text)

    def test_the_script_is_clean(self):
        if not shutil.which("shellcheck"):
            self.skipTest("no shellcheck")
        done = subprocess.run(["shellcheck", KIND / "up.sh"], capture_output=True, text=True)
        self.assertEqual(done.stdout, "")

    def up(self, failed, *arguments, without=""):
        """(exit status, calls, stderr) of up.sh, with stand-ins for the programs that it calls."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("kind", "kubectl", "helm", "buildah"):
                if name != without:
                    path = pathlib.Path(folder) / name
                    path.write_text(STAND_IN)
                    path.chmod(0o755)
            calls = pathlib.Path(folder) / "calls"
            calls.touch()
            log = json.dumps({"requests": {"total": 64, "ok": 64 - failed, "failed": failed}}, indent=2)
            done = subprocess.run([KIND / "up.sh", *arguments], capture_output=True, text=True,
                                  env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": folder, "CALLS": str(calls), "BENCH_LOG": log})
            return done.returncode, calls.read_text().splitlines(), done.stderr

    def test_the_script_does_things_in_order(self):
        status, calls, errors = self.up(0)
        self.assertEqual(status, 0, errors)
        order = ["buildah push", "kind create cluster --name splice", "kind load image-archive", "kubectl create namespace splice",
                 "kubectl --namespace splice create secret generic splice-auth", "helm install splice deploy/helm/splice",
                 "kubectl --namespace splice rollout status deployment/splice-router", "kubectl --namespace splice apply",
                 "kubectl --namespace splice logs job/bench ", "kubectl --namespace splice apply"]
        order += [f"kubectl --namespace splice rollout restart {pool}" for pool in
                  ("statefulset/splice-store", "statefulset/splice-prefill", "statefulset/splice-decode", "deployment/splice-router")]
        order += ["kubectl --namespace splice get job/bench-restarts", "kubectl --namespace splice logs job/bench-restarts",
                  "kind delete cluster --name splice"]
        rest = iter(calls)
        for wanted in order:
            self.assertTrue(any(call.startswith(wanted) for call in rest), f"{wanted} in\n" + "\n".join(calls))
        workloads = {f"{d['kind'].lower()}/{d['metadata']['name']}" for d in rendered() if d["kind"] in ("Deployment", "StatefulSet")}
        self.assertEqual({c.split()[-1] for c in calls if "rollout restart" in c}, workloads)

    def test_a_failed_request_fails_it_and_takes_the_cluster_down(self):
        status, calls, errors = self.up(1)
        self.assertNotEqual(status, 0)
        self.assertIn("requests failed", errors)
        self.assertEqual(calls[-1], "kind delete cluster --name splice")
        self.assertFalse([c for c in calls if "rollout restart" in c])

    def test_what_is_missing_is_named_before_anything_is_made(self):
        status, calls, errors = self.up(0, without="kind")
        self.assertEqual((status, calls), (1, []))
        self.assertIn("kind is not installed", errors)
        status, _, errors = self.up(0, "--frobnicate")
        self.assertEqual(status, 2)
        self.assertIn("--frobnicate", errors)


if __name__ == "__main__":
    unittest.main()
