"""The Helm chart refuses values that cannot work, and its message says what to set. Needs Helm."""
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

KEYS = [{"key": "k" * 24, "name": "a"}]
NO_SECRET = {"existingSecret": "", "namespaceSecret": "0123456789abcdef"}
ELSEWHERE = {"networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "web"}}}]}}
GATEWAY = {"enabled": True, "parentRefs": [{"name": "gateway"}]}


class ChartRefusalsTest(unittest.TestCase):
    def refused(self, values, *words):
        with self.subTest(values), self.assertRaises(render.RenderError) as raised:
            render.render(values=values)
        for word in words:
            self.assertIn(word, str(raised.exception))

    def test_single_values(self):
        for values, message in [
            ({"replicas": 3}, "replicas"),                                        # a value that does not exist
            ({"prefill": {"tp": 3}}, "tp"),
            ({"prefill": {"kvBytes": "8G"}}, "kvBytes"),                          # Kubernetes' unit, not the programs'
            ({"prefill": {"replicas": 0}}, "replicas"),
            ({"decode": {"replicas": "2"}}, "replicas"),
            ({"router": {"httpPort": 80}}, "httpPort"),                           # not root: no low ports
            ({"router": {"extraArgs": ["max-queue=3"]}}, "extraArgs"),
            ({"kvTransport": "shm"}, "kvTransport"),                              # pods share no memory
            ({"model": {"mountPath": "models"}}, "mountPath"),
            ({"networkPolicy": {"clients": [{}]}}, "clients"),                    # would be everybody
            ({"ingress": {"paths": []}}, "paths"),
            ({"ingress": None}, "ingress"),                                       # "enabled: false" is off
            ({"tracing": {"endpoint": "collector:4317"}}, "endpoint"),            # gRPC's port, and no scheme
            ({"monitoring": {"podMonitor": {"interval": "15"}}}, "interval"),
        ]:
            self.refused(values, message)

    def test_keys(self):
        self.refused({"auth": {"existingSecret": ""}}, "auth.enabled")
        self.refused({"auth": {"existingSecret": "", "apiKeys": KEYS}}, "namespaceSecret")
        self.refused({"auth": {"existingSecret": "", "apiKeys": [{"key": "short", "name": "a"}]}}, "apiKeys")
        # Lines as in a file of keys.
        self.refused({"auth": {**NO_SECRET, "apiKeys": ["KEY NAME"]}}, "auth.apiKeys", "{key: SECRET, name: NAME")
        # They would be left out without a word: the chart's own existingSecret is not empty.
        self.refused({"auth": {"apiKeys": KEYS}}, "splice-auth", 'existingSecret: ""')
        self.refused({"auth": {"enabled": False, "apiKeys": KEYS}}, "auth.enabled: true")

    def test_ways_in_that_the_network_policy_closes(self):
        for values in ({"ingress": {"enabled": True}}, {"httpRoute": GATEWAY},
                       {"router": {"replicas": 1}, "autoscaling": {"enabled": True, "kind": "keda"}}):
            self.refused(values, "networkPolicy.clients", "namespaceSelector")
            render.render(values={**values, **ELSEWHERE})
            render.render(values={**values, "networkPolicy": {"enabled": False}})

    def test_routes_that_lead_nowhere(self):
        self.refused({"httpRoute": {"enabled": True}, **ELSEWHERE}, "httpRoute.parentRefs")
        self.refused({"httpRoute": GATEWAY, "publicTls": {"enabled": True}, **ELSEWHERE}, "publicTls.enabled: false")

    def test_pools(self):
        self.refused({"rdma": {"enabled": True}}, "kvTransport")
        self.refused({"autoscaling": {"enabled": True}}, "router.replicas")
        self.refused({"router": {"replicas": 1},
                      "autoscaling": {"enabled": True, "kind": "hpa", "decode": {"minReplicas": 9, "maxReplicas": 8}}},
                     "autoscaling.decode.minReplicas")
        self.refused({"decode": {"backend": "cuda"}}, "decode.backend", "gpu.enabled: true")
        self.refused({"router": {"grpcPort": 8000}}, "router.grpcPort")
        self.refused({"store": {"port": 9103}}, "store.port")

    def test_sizes_that_do_not_fit(self):
        self.refused({"prefill": {"kvBytes": "24GiB"}}, "prefill.kvBytes", "limits.memory (24Gi)")
        self.refused({"decode": {"resources": {"limits": {"memory": "8G"}}}}, "decode.kvBytes")
        self.refused({"store": {"memoryBytes": "1TiB"}}, "store.memoryBytes")
        self.refused({"store": {"diskBytes": "0.2TiB"}}, "store.diskBytes", "store.volume.size")
        render.render(values={"decode": {"kvBytes": "23.5GiB"}, "store": {"memoryBytes": "15GiB"}})
        render.render(values={"decode": {"kvBytes": "auto", "resources": {"limits": {"memory": "8G"}}}})
        render.render(values={"prefill": {"kvBytes": "64GiB"}, "gpu": {"enabled": True}})  # of the GPUs' memory

    def test_flags_that_the_chart_sets(self):
        count = 0
        for document in render.render(values={}):
            program = re.search(r"^          command: \[splice-(\w+)\]$", document, re.MULTILINE)
            if program is None:
                continue
            pool = program.group(1).replace("kvstore", "store")
            flags = re.findall(r"^            - (--[a-z-]+)=", document, re.MULTILINE)
            # They depend on values: with other ones a person may give them.
            flags = set(flags) - {"--prefill", "--decode", "--store", "--api-keys", "--secret-file"}
            self.assertGreater(len(flags), 5)
            for flag in flags:
                self.refused({pool: {"extraArgs": [flag + "=1"]}}, f"{pool}.extraArgs", flag)
                count += 1
        self.assertGreater(count, 30)
        render.render(values={"router": {"extraArgs": ["--max-attempts=2"]}})
        spans = {"store": {"extraArgs": ["--otlp-endpoint=http://collector:4318"]}}
        self.refused(spans, "store.extraArgs", "tracing.endpoint")
        render.render(values={**spans, "networkPolicy": {"enabled": False}})


if __name__ == "__main__":
    unittest.main()
