"""The Helm chart: renders what deploy/manifests has, and refuses values that cannot work. Needs Helm."""
import re
import shutil
import sys
import unittest

import tools

tools.need("yaml")
if shutil.which("helm") is None:
    tools.need("helm_python")
sys.path.insert(0, str(tools.ROOT / "deploy" / "helm"))
import render  # noqa: E402

OPEN = {"auth": {"enabled": False}}
# Whose pods are in another namespace: KEDA's, an ingress controller's, a gateway's.
ELSEWHERE = {"networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}]}}


def workloads(values):
    documents = tools.load_documents("".join("---\n" + text for text in render.render(values=values)))
    return {d["metadata"]["name"]: d for d in documents if d["kind"] in ("Deployment", "StatefulSet")}, documents


def arguments(workload):
    return workload["spec"]["template"]["spec"]["containers"][0]["args"]


class ChartTest(unittest.TestCase):
    def test_manifests_are_what_the_chart_renders(self):
        for name in render.PROFILES:
            self.assertEqual((render.MANIFESTS / name).read_text(), render.manifest(name),
                             f"{name} is stale: run ./dev charts")

    def test_the_lists_follow_the_replicas(self):
        sets, _ = workloads({"prefill": {"replicas": 3}, "decode": {"replicas": 5}, "store": {"replicas": 1}})
        flags = dict(a.split("=", 1) for a in arguments(sets["splice-router"]))
        self.assertEqual([len(flags[f].split(",")) for f in ("--prefill", "--decode", "--store")], [3, 5, 1])
        self.assertTrue(flags["--decode"].endswith("splice-decode-4.splice-decode.splice.svc.cluster.local:7102"))
        self.assertIn("--store=" + flags["--store"], arguments(sets["splice-prefill"]))

    def test_kubernetes_finds_the_workers(self):
        sets, documents = workloads({"discovery": {"mode": "kubernetes"}})
        router = arguments(sets["splice-router"])
        self.assertIn("--discovery=kubernetes://splice/splice", router)
        self.assertFalse([a for a in router if a.startswith(("--prefill=", "--decode="))])
        self.assertTrue(sets["splice-router"]["spec"]["template"]["spec"]["automountServiceAccountToken"])
        self.assertFalse(sets["splice-prefill"]["spec"]["template"]["spec"]["automountServiceAccountToken"])
        role, = [d for d in documents if d["kind"] == "Role"]
        self.assertEqual(role["rules"], [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"],
                                          "verbs": ["get", "list", "watch"]}])
        binding, = [d for d in documents if d["kind"] == "RoleBinding"]
        self.assertEqual(binding["subjects"][0]["name"],
                         sets["splice-router"]["spec"]["template"]["spec"]["serviceAccountName"])
        # The services that it asks for are the ones there are.
        services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
        for role_name in ("prefill", "decode"):
            self.assertEqual(services[f"splice-{role_name}"]["spec"]["ports"][0]["name"], "grpc")

    def test_static_lists_need_no_rights(self):
        sets, documents = workloads({})
        self.assertFalse([d for d in documents if d["kind"] in ("Role", "RoleBinding")])
        self.assertFalse(sets["splice-router"]["spec"]["template"]["spec"]["automountServiceAccountToken"])

    def test_a_model_is_pulled_before_programs_start(self):
        claim = {"persistentVolumeClaim": {"claimName": "models", "readOnly": False}}
        model = {"pull": "org/name@v1", "tokenSecret": "hub-token", "hub": "https://mirror:8443/hub", "volume": claim,
                 "subPath": "name"}
        sets, documents = workloads({"model": model})
        for name in ("splice-router", "splice-prefill", "splice-decode"):
            pod = sets[name]["spec"]["template"]["spec"]
            pull, = pod["initContainers"]
            self.assertEqual(pull["command"] + pull["args"], ["splice", "pull", "org/name@v1", "--to=/models/model",
                                                              "--hub=https://mirror:8443/hub", "--if-missing"])
            self.assertEqual(pull["env"][0]["valueFrom"], {"secretKeyRef": {"name": "hub-token", "key": "token"}})
            mount, = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "model"]
            self.assertEqual({**pull["volumeMounts"][0], "readOnly": True}, mount, "what it fills is what the program reads")
            self.assertTrue(pull["securityContext"]["readOnlyRootFilesystem"])
        self.assertNotIn("initContainers", sets["splice-store"]["spec"]["template"]["spec"])
        policies = {d["metadata"]["name"]: d for d in documents if d["kind"] == "NetworkPolicy"}
        for name in ("router", "prefill", "decode"):
            ports = [p["port"] for rule in policies[f"splice-{name}"]["spec"]["egress"] for p in rule["ports"]]
            self.assertTrue({53, 443, 8443} <= set(ports), name)
        ports = [p["port"] for rule in policies["splice-store"]["spec"]["egress"] for p in rule["ports"]]
        self.assertNotIn(443, ports)
        with self.assertRaises(Exception):
            workloads({"model": {"pull": "org/name"}})  # the default volume is read-only
        with self.assertRaises(Exception):
            workloads({"model": {"pull": "name", "volume": claim}})

    def test_nothing_is_pulled_by_default(self):
        sets, _ = workloads({})
        for name, workload in sets.items():
            self.assertNotIn("initContainers", workload["spec"]["template"]["spec"], name)

    def test_etcd_is_told_to_routers_and_workers(self):
        etcd = {"mode": "etcd", "etcd": {"endpoints": ["etcd-0.etcd:2379", "etcd-1.etcd:2379"]}}
        sets, documents = workloads({"discovery": etcd})
        flag = "--discovery=etcd://etcd-0.etcd:2379,etcd-1.etcd:2379/splice"
        for name in ("splice-router", "splice-prefill", "splice-decode"):
            self.assertIn(flag, arguments(sets[name]))
        policies = {d["metadata"]["name"]: d for d in documents if d["kind"] == "NetworkPolicy"}
        ports = [p["port"] for rule in policies["splice-decode"]["spec"]["egress"] for p in rule["ports"]]
        self.assertIn(2379, ports)
        with self.assertRaises(Exception):
            workloads({"discovery": {"mode": "etcd"}})

    def test_etcd_that_asks_who_one_is(self):
        etcd = {"endpoints": ["etcd-0.etcd:2379"], "existingSecret": "etcd-client"}
        values = {"discovery": {"mode": "etcd", "etcd": etcd}}
        every = ["--etcd-ca=/etc/splice/etcd/ca.crt", "--etcd-cert=/etc/splice/etcd/tls.crt",
                 "--etcd-key=/etc/splice/etcd/tls.key", "--etcd-user=splice",
                 "--etcd-password-file=/etc/splice/etcd/password"]

        def check(flags):
            sets, _ = workloads(values)
            for name in ("splice-router", "splice-prefill", "splice-decode", "splice-store"):
                want = [] if name == "splice-store" else flags
                self.assertEqual([a for a in arguments(sets[name]) if a.startswith("--etcd-")], want)
                pod = sets[name]["spec"]["template"]["spec"]
                mounts = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/etc/splice/etcd"]
                volumes = [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "etcd"]
                self.assertEqual((len(mounts), volumes), (1, ["etcd-client"]) if want else (0, []))

        check(every[:1])
        etcd |= {"clientCertificate": True, "user": "splice"}
        check(every)
        del etcd["existingSecret"]
        with self.assertRaises(Exception):
            workloads(values)

    def test_tls_is_off_or_everywhere(self):
        sets, _ = workloads({})
        self.assertFalse([a for s in sets.values() for a in arguments(s) if a.startswith("--tls")])
        sets, _ = workloads({"tls": {"enabled": True, "existingSecret": "mine", "serverName": "workers.internal"}})
        self.assertEqual(len(sets), 4)
        for workload in sets.values():
            flags = dict(a.split("=", 1) for a in arguments(workload))
            pod = workload["spec"]["template"]["spec"]
            mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
            for flag, entry in (("--tls-cert", "tls.crt"), ("--tls-key", "tls.key"), ("--tls-ca", "ca.crt")):
                self.assertEqual(flags[flag], mounts["tls"] + "/" + entry)
            self.assertEqual(flags["--tls-server-name"], "workers.internal")
            volumes = {v["name"]: v for v in pod["volumes"]}
            self.assertEqual(volumes["tls"]["secret"]["secretName"], "mine")
        with self.assertRaises(Exception):
            workloads({"tls": {"enabled": True, "existingSecret": ""}})

    def test_public_tls_is_the_routers_alone(self):
        sets, documents = workloads({})
        self.assertFalse([a for s in sets.values() for a in arguments(s) if a.startswith("--public-tls")])
        plain = next(d for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == "splice-router")
        self.assertEqual([p.get("appProtocol") for p in plain["spec"]["ports"]], [None, "kubernetes.io/h2c"])

        values = {"publicTls": {"enabled": True, "existingSecret": "mine"}, "router": {"replicas": 1},
                  "autoscaling": {"enabled": True, "kind": "keda"}, **ELSEWHERE}
        sets, documents = workloads(values)
        flags = dict(a.split("=", 1) for a in arguments(sets["splice-router"]))
        pod = sets["splice-router"]["spec"]["template"]["spec"]
        mounts = {m["name"]: m for m in pod["containers"][0]["volumeMounts"]}
        self.assertTrue(mounts["public-tls"]["readOnly"])
        for flag, entry in (("--public-tls-cert", "tls.crt"), ("--public-tls-key", "tls.key")):
            self.assertEqual(flags[flag], mounts["public-tls"]["mountPath"] + "/" + entry)
        volumes = {v["name"]: v for v in pod["volumes"]}
        self.assertEqual(volumes["public-tls"]["secret"]["secretName"], "mine")
        for name, workload in sets.items():
            if name != "splice-router":
                self.assertFalse([a for a in arguments(workload) if "public-tls" in a])
        service = next(d for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == "splice-router")
        self.assertEqual([p["appProtocol"] for p in service["spec"]["ports"]], ["https", "https"])
        # Probes and scrapers go on asking the metrics port in plain text.
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = pod["containers"][0][probe]["httpGet"]
            self.assertEqual(asked["port"], "metrics")
            self.assertEqual(asked.get("scheme", "HTTP"), "HTTP")
        triggers = [d["spec"]["triggers"][0]["metadata"] for d in documents if d["kind"] == "ScaledObject"]
        self.assertEqual([t.get("enableTLS") for t in triggers], ["true", "true"])
        with self.assertRaises(Exception):
            workloads({"publicTls": {"enabled": True, "existingSecret": ""}})

    def test_without_stores_nobody_asks_for_one(self):
        sets, documents = workloads({"store": {"replicas": 0}})
        self.assertNotIn("splice-store", sets)
        self.assertFalse([a for s in sets.values() for a in arguments(s) if a.startswith("--store")])
        self.assertFalse([d for d in documents if d["metadata"]["name"] == "splice-store" and d["kind"] != "NetworkPolicy"])

    def test_decode_workers_that_prefill_read_the_store(self):
        sets, documents = workloads({})
        self.assertFalse([a for a in arguments(sets["splice-decode"]) if a.startswith(("--local-prefill", "--store"))])

        def peers(documents, name, direction):
            policy, = [d for d in documents if d["kind"] == "NetworkPolicy" and d["metadata"]["name"] == name]
            key = {"ingress": "from", "egress": "to"}[direction]
            return {p["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
                    for rule in policy["spec"][direction] for p in rule[key] if "namespaceSelector" not in p}
        self.assertNotIn("store", peers(documents, "splice-decode", "egress"))
        local = {"decode": {"localPrefill": {"tokens": 512, "sliceTokens": 64}}}
        sets, documents = workloads(local)
        flags = dict(a.split("=", 1) for a in arguments(sets["splice-decode"]))
        self.assertEqual([flags["--local-prefill-" + f] for f in ("tokens", "slice-tokens")], ["512", "64"])
        self.assertIn("--store=" + flags["--store"], arguments(sets["splice-prefill"]))
        self.assertFalse([a for a in arguments(sets["splice-prefill"]) if a.startswith("--local-prefill")])
        self.assertIn("store", peers(documents, "splice-decode", "egress"))
        self.assertIn("decode", peers(documents, "splice-store", "ingress"))
        sets, _ = workloads({**local, "store": {"replicas": 0}})
        self.assertFalse([a for a in arguments(sets["splice-decode"]) if a.startswith("--store")])
        with self.assertRaises(Exception):
            workloads({"decode": {"localPrefill": {"sliceTokens": 100}}})

    def test_pools_that_are_scaled_have_no_number_of_their_own(self):
        scaled = {"enabled": True, "prefill": {"minReplicas": 2, "maxReplicas": 6}, "decode": {"minReplicas": 1, "maxReplicas": 4}}
        for kind, name in [("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")]:
            sets, documents = workloads({"router": {"replicas": 1}, "autoscaling": {**scaled, "kind": kind}, **ELSEWHERE})
            self.assertNotIn("replicas", sets["splice-prefill"]["spec"])
            self.assertIn("replicas", sets["splice-store"]["spec"])
            flags = dict(a.split("=", 1) for a in arguments(sets["splice-router"]))
            self.assertEqual([len(flags[f].split(",")) for f in ("--prefill", "--decode")], [6, 4])
            self.assertEqual((flags["--min-prefill"], flags["--max-decode"]), ("2", "4"))
            scalers = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == name}
            self.assertEqual(set(scalers), {"splice-prefill", "splice-decode"})
            if kind == "keda":
                trigger = scalers["splice-decode"]["triggers"][0]
                self.assertEqual(trigger["type"], "external")
                self.assertEqual(trigger["metadata"], {
                    "scalerAddress": "splice-router.splice.svc.cluster.local:8001", "pool": "decode"})
        _, documents = workloads({})
        self.assertFalse([d for d in documents if d["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")], "off by default")

    def test_the_grace_period_follows_the_drain(self):
        sets, _ = workloads({"router": {"drainTimeoutMs": 600_000, "preStopSeconds": 20}})
        self.assertEqual(sets["splice-router"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], 630)

    def test_gpus_follow_tensor_parallelism(self):
        sets, _ = workloads({"gpu": {"enabled": True}, "prefill": {"tp": 4}})
        for name, gpus in [("splice-prefill", 4), ("splice-decode", 1)]:
            resources = sets[name]["spec"]["template"]["spec"]["containers"][0]["resources"]
            self.assertEqual(resources["limits"]["nvidia.com/gpu"], gpus)
        store = sets["splice-store"]["spec"]["template"]["spec"]["containers"][0]["resources"]
        self.assertNotIn("nvidia.com/gpu", store["limits"])

    def test_a_pool_that_computes_on_the_cpu_takes_no_gpu(self):
        sets, _ = workloads({"gpu": {"enabled": True, "runtimeClassName": "nvidia"}, "decode": {"backend": "cpu"}})
        for name, gpus in [("splice-prefill", 1), ("splice-decode", None)]:
            pod = sets[name]["spec"]["template"]["spec"]
            self.assertEqual(pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu"), gpus)
            self.assertEqual(pod.get("runtimeClassName"), "nvidia" if gpus else None)

    def test_images_are_those_that_are_built(self):
        version = re.search(r"^project\(splice VERSION ([\d.]+)", (tools.ROOT / "CMakeLists.txt").read_text(), re.M).group(1)
        chart = tools.load_documents((render.CHART / "Chart.yaml").read_text())[0]
        self.assertEqual((chart["version"], chart["appVersion"]), (version, version))
        script = (tools.ROOT / "deploy" / "images" / "make.sh").read_text()
        self.assertIn("--name NAME:TAG     default splice:VERSION, with --cuda-libs splice-gpu:VERSION\n", script)
        for name in render.PROFILES:
            images = {c["image"] for d in tools.load_documents((render.MANIFESTS / name).read_text())
                      if d["kind"] in ("Deployment", "StatefulSet") for c in d["spec"]["template"]["spec"]["containers"]}
            self.assertEqual(images, {f"splice{'-gpu' if 'gpu' in name else ''}:{version}"})

    def test_a_secret_of_its_own(self):
        values = {"auth": {"existingSecret": "", "namespaceSecret": "0123456789abcdef",
                           "apiKeys": [{"key": "k" * 24, "name": "a"}, {"key": "l" * 24, "name": "b", "role": "admin", "weight": 2, "rpm": 600}]}}
        sets, documents = workloads(values)
        secret = next(d for d in documents if d["kind"] == "Secret")
        self.assertEqual(secret["stringData"]["api-keys"], f"{'k' * 24} a\n{'l' * 24} b rpm=600 weight=2 role=admin\n")
        volumes = sets["splice-router"]["spec"]["template"]["spec"]["volumes"]
        self.assertIn(secret["metadata"]["name"], [v["secret"]["secretName"] for v in volumes if "secret" in v])

    def test_an_open_cluster_must_be_asked_for(self):
        sets, _ = workloads(OPEN)
        self.assertFalse([a for a in arguments(sets["splice-router"]) if a.startswith(("--api-keys", "--secret"))])
        self.assertIn("--insecure-open", arguments(sets["splice-router"]))
        sets, _ = workloads({})
        self.assertNotIn("--insecure-open", arguments(sets["splice-router"]))


if __name__ == "__main__":
    unittest.main()
