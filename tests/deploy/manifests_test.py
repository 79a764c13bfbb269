"""deploy/manifests: current, safe by default, and in agreement with the programs' flags and timeouts."""
import re
import sys
import unittest

import tools

tools.need("yaml")
sys.path.insert(0, str(tools.ROOT / "deploy" / "helm"))
import render  # noqa: E402

SERVICES = tools.ROOT / "services"
# The sources that say which flags a program has.
FLAG_SOURCES = {
    "splice-router": "router/router_flags.cc",
    "splice-prefill": "worker_flags/worker_flags.cc",
    "splice-decode": "worker_flags/worker_flags.cc",
    "splice-kvstore": "kvstore/main.cc",
}


def milliseconds(path, name):
    """The default of a std::chrono::milliseconds field."""
    return int(re.search(rf"milliseconds {name}\{{([\d']+)\}}", (SERVICES / path).read_text()).group(1).replace("'", ""))


class ManifestsTest(unittest.TestCase):
    def setUp(self):
        self.files = {name: (render.MANIFESTS / name).read_text() for name in render.PROFILES}
        self.documents = {name: tools.load_documents(text) for name, text in self.files.items()}

    def of_kind(self, name, *kinds):
        return {d["metadata"]["name"]: d for d in self.documents[name] if d["kind"] in kinds}

    def workloads(self):
        """(file, workload, pod template's spec, its only container) of every workload."""
        for name in self.documents:
            for workload in self.of_kind(name, "Deployment", "StatefulSet").values():
                spec = workload["spec"]["template"]["spec"]
                self.assertEqual(len(spec["containers"]), 1)
                yield name, workload, spec, spec["containers"][0]

    def test_they_follow_from_the_chart_as_it_is(self):
        for name, text in self.files.items():
            self.assertIn(f"# chart-digest: {render.digest()}\n", text,
                          f"deploy/manifests/{name} is stale: run ./dev charts")

    def test_all_parts_are_there(self):
        for name in self.documents:
            for kind, count in [("Deployment", 1), ("StatefulSet", 3), ("Service", 4), ("ServiceAccount", 4),
                                ("PodDisruptionBudget", 4), ("NetworkPolicy", 6)]:
                self.assertEqual(len(self.of_kind(name, kind)), count, kind)

    def test_pods_run_without_rights(self):
        for name, workload, spec, container in self.workloads():
            with self.subTest(f"{name} {workload['metadata']['name']}"):
                self.assertTrue(spec["securityContext"]["runAsNonRoot"])
                self.assertGreater(spec["securityContext"]["runAsUser"], 0)
                self.assertEqual(spec["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
                self.assertFalse(spec["automountServiceAccountToken"])
                self.assertIn(spec["serviceAccountName"], self.of_kind(name, "ServiceAccount"))
                security = container["securityContext"]
                self.assertFalse(security["allowPrivilegeEscalation"])
                self.assertTrue(security["readOnlyRootFilesystem"])
                self.assertEqual(security["capabilities"]["drop"], ["ALL"])
                rdma = any(key.startswith("rdma/") for key in container["resources"]["limits"])
                self.assertEqual(security["capabilities"].get("add", []), ["IPC_LOCK"] if rdma else [])

    def test_flags_are_the_programs_own(self):
        for name, workload, _, container in self.workloads():
            program = container["command"][0]
            known = set(re.findall(r'"(--[a-z-]+)"', (SERVICES / FLAG_SOURCES[program]).read_text()))
            self.assertGreater(len(known), 10)
            given = [argument.split("=", 1)[0] for argument in container["args"]]
            with self.subTest(f"{name} {workload['metadata']['name']}"):
                self.assertLessEqual(set(given), known)
                self.assertEqual(len(given), len(set(given)), "a flag twice")
                variables = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
                self.assertLessEqual(variables, {entry["name"] for entry in container.get("env", [])})

    def test_probes_ask_the_metrics_port(self):
        for name, workload, _, container in self.workloads():
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            flags = dict(argument.split("=", 1) for argument in container["args"])
            with self.subTest(f"{name} {workload['metadata']['name']}"):
                for probe, path in [("startupProbe", "/healthz"), ("readinessProbe", "/readyz"),
                                    ("livenessProbe", "/healthz")]:
                    self.assertEqual(container[probe]["httpGet"], {"path": path, "port": "metrics"})
                self.assertEqual(int(flags["--metrics-listen"].rsplit(":", 1)[1]), ports["metrics"])
                for flag, port in [("--listen", "grpc"), ("--http", "http"), ("--grpc", "grpc")]:
                    if flag in flags:
                        self.assertEqual(int(flags[flag].rsplit(":", 1)[1]), ports[port])

    def test_programs_help_and_default_to_the_same_ports(self):
        ports = {"splice-router": set(), "splice-prefill": set(), "splice-decode": set(), "splice-kvstore": set()}
        for _, _, _, container in self.workloads():
            ports[container["command"][0]] |= {str(port["containerPort"]) for port in container["ports"]}
        every = set().union(*ports.values())
        for program, own in ports.items():
            text = (SERVICES / program.removeprefix("splice-") / "main.cc").read_text()
            named = set(re.findall(r"\d\.\d:(\d+)", text))
            self.assertLessEqual(named, every, program)
            self.assertTrue(named & own, program)

    def test_pods_have_the_time_that_the_programs_take_to_drain(self):
        shutdown = milliseconds("base/service_host.h", "shutdown_timeout")
        fixed = {"splice-prefill": milliseconds("prefill/prefill_server.h", "drain_timeout"),
                 "splice-decode": milliseconds("decode/decode_server.h", "drain_timeout"),
                 "splice-kvstore": milliseconds("kvstore/kvstore_server.h", "drain_timeout")}
        for name, workload, spec, container in self.workloads():
            flags = dict(argument.split("=", 1) for argument in container["args"])
            drain = fixed.get(container["command"][0]) or int(flags["--drain-timeout-ms"])
            wait = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            self.assertEqual(wait[0], "sleep")
            with self.subTest(f"{name} {workload['metadata']['name']}"):
                self.assertGreaterEqual(spec["terminationGracePeriodSeconds"] * 1000,
                                        int(wait[1]) * 1000 + drain + shutdown + 5000)

    def most_replicas(self, name, pool):
        """Of a pool that is scaled: as many as there may be."""
        if "replicas" in pool["spec"]:
            return pool["spec"]["replicas"]
        scalers = {**self.of_kind(name, "ScaledObject"), **self.of_kind(name, "HorizontalPodAutoscaler")}
        spec = scalers[pool["metadata"]["name"]]["spec"]
        self.assertEqual(spec["scaleTargetRef"], {"apiVersion": "apps/v1", "kind": "StatefulSet",
                                                  "name": pool["metadata"]["name"]})
        return spec["maxReplicaCount"] if "maxReplicaCount" in spec else spec["maxReplicas"]

    def test_members_are_the_pods_of_the_stateful_sets(self):
        for name in self.documents:
            sets, services = self.of_kind(name, "StatefulSet"), self.of_kind(name, "Service")
            for _, workload, _, container in (w for w in self.workloads() if w[0] == name):
                flags = dict(argument.split("=", 1) for argument in container["args"])
                for flag in ("--prefill", "--decode", "--store"):
                    if flag not in flags:
                        continue
                    pool = sets["splice" + flag[1:]]
                    service = services[pool["spec"]["serviceName"]]
                    self.assertEqual(service["spec"]["clusterIP"], "None")
                    self.assertEqual(service["spec"]["selector"], pool["spec"]["selector"]["matchLabels"])
                    expected = [f"{pool['metadata']['name']}-{i}.{service['metadata']['name']}.splice.svc.cluster.local:"
                                f"{service['spec']['ports'][0]['port']}" for i in range(self.most_replicas(name, pool))]
                    self.assertEqual(flags[flag].split(","), expected, workload["metadata"]["name"])

    def test_nothing_is_open_but_what_is_listed(self):
        for name in self.documents:
            policies = self.of_kind(name, "NetworkPolicy")
            deny = policies["splice-deny"]["spec"]
            self.assertEqual(deny["policyTypes"], ["Ingress", "Egress"])
            self.assertNotIn("ingress", deny)
            self.assertNotIn("egress", deny)
            for _, workload, _, _ in (w for w in self.workloads() if w[0] == name):
                labels = workload["spec"]["template"]["metadata"]["labels"].items()
                self.assertLessEqual(deny["podSelector"]["matchLabels"].items(), labels)
            for policy in policies.values():
                for rule in policy["spec"].get("ingress", []) + policy["spec"].get("egress", []):
                    self.assertTrue(rule.get("from") or rule.get("to"), "a rule for everybody")
                    self.assertTrue(rule.get("ports"), "a rule for all ports")

    def test_what_one_side_may_send_the_other_may_receive(self):
        component = "app.kubernetes.io/component"

        def rules(policies, direction, peers):
            """{(own component, peer component): ports} of the policies of single components."""
            found = {}
            for policy in policies.values():
                own = policy["spec"]["podSelector"]["matchLabels"].get(component)
                for rule in policy["spec"].get(direction, []):
                    for peer in rule[peers]:
                        other = peer.get("podSelector", {}).get("matchLabels", {}).get(component)
                        if own and other:
                            found[own, other] = rule["ports"]
            return found

        for name in self.documents:
            policies = self.of_kind(name, "NetworkPolicy")
            egress, ingress = rules(policies, "egress", "to"), rules(policies, "ingress", "from")
            self.assertEqual({(b, a): ports for (a, b), ports in egress.items()}, ingress)
            self.assertEqual({peer for own, peer in egress if own == "router"}, {"prefill", "decode", "store"})


if __name__ == "__main__":
    unittest.main()
