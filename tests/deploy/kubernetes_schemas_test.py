"""deploy/manifests against the schemas of the oldest version that the chart promises, one in between, and a new one."""
import copy
import sys
import unittest

import tools

tools.need("yaml", "kubernetes_validate")
import kubernetes_validate  # noqa: E402

sys.path.insert(0, str(tools.ROOT / "deploy" / "helm"))
import render  # noqa: E402

VERSIONS = ["1.25.0", "1.31.0", "1.37.0"]


def documents():
    for name in render.PROFILES:
        for document in tools.load_documents((render.MANIFESTS / name).read_text()):
            if not document["apiVersion"].startswith("keda.sh/"):  # KEDA's own kind: chart_test.py looks at it
                yield name, document


class KubernetesSchemasTest(unittest.TestCase):
    def test_manifests_are_valid(self):
        count = 0
        for version in VERSIONS:
            for name, document in documents():
                with self.subTest(f"{version} {name} {document['kind']} {document['metadata']['name']}"):
                    kubernetes_validate.validate(document, version, strict=True)
                    count += 1
        self.assertGreater(count, 100)

    def test_what_is_off_by_default_is_valid_too(self):
        elsewhere = {"clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "web"}}}]}
        values = [{"ingress": {"enabled": True}, "networkPolicy": elsewhere},
                  {"ingress": {"enabled": True, "className": "a", "hosts": ["a.b"], "tlsSecret": "s", "annotations": {"a": "b"}},
                   "publicTls": {"enabled": True}, "networkPolicy": {"enabled": False}},
                  {"monitoring": {"rules": {"enabled": True}, "dashboards": {"enabled": True}}, "scrapeAnnotations": False},
                  {"discovery": {"mode": "kubernetes"}, "store": {"replicas": 0}},
                  {"tracing": {"endpoint": "http://collector:4318"}, "decode": {"tp": 2, "priorityClassName": "p", "podLabels": {"a": "b"}},
                   "gpu": {"enabled": True}, "router": {"env": [{"name": "X", "value": "y"}]}},
                  {"auth": {"existingSecret": "", "namespaceSecret": "0123456789abcdef",
                            "apiKeys": [{"key": "k" * 24, "name": "a", "rpm": 6}]}, "tls": {"enabled": True}}]
        kinds = set()
        try:
            for each in values:
                texts = render.render(values=each)
                for document in tools.load_documents("".join("---\n" + text for text in texts)):
                    kinds.add(document["kind"])
                    for version in VERSIONS:
                        with self.subTest(f"{version} {document['kind']} {document['metadata']['name']}"):
                            kubernetes_validate.validate(document, version, strict=True)
        except render.NoRenderer as error:
            self.skipTest(str(error))
        self.assertLessEqual({"Ingress", "ConfigMap", "Secret", "Role"}, kinds)

    def test_mistakes_are_noticed(self):
        deployment = next(d for _, d in documents() if d["kind"] == "Deployment")
        for change in [lambda d: d["spec"].update(replicas="two"),
                       lambda d: d["spec"].update(replica=2),
                       lambda d: d["spec"].pop("selector"),
                       lambda d: d["spec"]["template"]["spec"]["containers"][0]["readinessProbe"].update(path="/readyz")]:
            broken = copy.deepcopy(deployment)
            change(broken)
            for version in VERSIONS:
                with self.assertRaises(kubernetes_validate.ValidationError):
                    kubernetes_validate.validate(broken, version, strict=True)


if __name__ == "__main__":
    unittest.main()
