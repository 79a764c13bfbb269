"""Objects that the chart makes on request: monitoring objects and ways in from outside. Needs Helm; custom resources have no schema here, so
that their fields are looked at one by one."""
import json
import shutil
import sys
import unittest

import tools

tools.need("yaml")
if shutil.which("helm") is None:
    tools.need("helm_python")
sys.path.insert(0, str(tools.ROOT / "deploy" / "helm"))
import render  # noqa: E402

GRAFANA = tools.ROOT / "deploy" / "grafana"
PROMETHEUS = tools.ROOT / "deploy" / "prometheus"
ELSEWHERE = {"clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "web"}}}]}
RELEASE_SIZE = 1 << 20  # of the Secret in which Helm keeps a release: chart and manifests, compressed, twice base64


def documents(values):
    return tools.load_documents("".join("---\n" + text for text in render.render(values=values)))


def of_kind(values, kind):
    return [d for d in documents(values) if d["kind"] == kind]


class ChartOptionsTest(unittest.TestCase):
    def test_off_by_default(self):
        kinds = {d["kind"] for d in documents({})}
        self.assertEqual(kinds & {"Ingress", "HTTPRoute", "PodMonitor", "PrometheusRule", "ConfigMap"}, set())

    def test_the_operator_scrapes_what_prometheus_yml_scrapes(self):
        monitor, = of_kind({"monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}}, "PodMonitor")
        self.assertEqual(monitor["apiVersion"], "monitoring.coreos.com/v1")
        self.assertEqual(monitor["metadata"]["labels"]["release"], "prometheus")
        endpoint, = monitor["spec"]["podMetricsEndpoints"]
        self.assertEqual({k: endpoint[k] for k in ("port", "path", "interval")},
                         {"port": "metrics", "path": "/metrics", "interval": "15s"})
        config = tools.load_documents((PROMETHEUS / "prometheus.yml").read_text())[0]["scrape_configs"][0]
        want = {(r["source_labels"][0], r["target_label"]) for r in config["relabel_configs"] if "target_label" in r}
        own = {("__meta_kubernetes_namespace", "namespace"), ("__meta_kubernetes_pod_name", "pod")}  # the operator's
        got = {(r["sourceLabels"][0], r["targetLabel"]) for r in endpoint["relabelings"] if "sourceLabels" in r}
        self.assertEqual(got, want - own)
        self.assertIn({"targetLabel": "job", "replacement": config["job_name"]}, endpoint["relabelings"])

    def test_every_pod_is_monitored_and_none_twice(self):
        values = {"monitoring": {"podMonitor": {"enabled": True}}}
        selector = of_kind(values, "PodMonitor")[0]["spec"]["selector"]["matchLabels"]
        pods = [d["spec"]["template"] for d in documents(values) if d["kind"] in ("Deployment", "StatefulSet")]
        self.assertEqual(len(pods), 4)
        for pod in pods:
            self.assertLessEqual(selector.items(), pod["metadata"]["labels"].items())
            self.assertIn("metrics", [p["name"] for p in pod["spec"]["containers"][0]["ports"]])
            self.assertNotIn("prometheus.io/scrape", pod["metadata"].get("annotations", {}))

    def test_rules_are_the_file(self):
        text = (PROMETHEUS / "alerts.yml").read_text()
        rule, = of_kind({"monitoring": {"prometheusRule": {"enabled": True, "labels": {"role": "alerts"}}}}, "PrometheusRule")
        self.assertEqual(rule["apiVersion"], "monitoring.coreos.com/v1")
        self.assertEqual(rule["metadata"]["labels"]["role"], "alerts")
        self.assertEqual(rule["spec"], tools.load_documents(text)[0])
        config, = of_kind({"monitoring": {"rules": {"enabled": True}}}, "ConfigMap")
        self.assertEqual(tools.load_documents(config["data"]["alerts.yml"]), tools.load_documents(text))

    def test_dashboards_are_the_files(self):
        maps = of_kind({"monitoring": {"dashboards": {"enabled": True, "annotations": {"grafana_folder": "Splice"}}}}, "ConfigMap")
        files = {path.name: json.loads(path.read_text()) for path in GRAFANA.glob("*.json")}
        self.assertGreater(len(files), 4)
        self.assertEqual({name: json.loads(text) for m in maps for name, text in m["data"].items()}, files)
        for config in maps:
            self.assertEqual(config["metadata"]["labels"]["grafana_dashboard"], "1")
            self.assertEqual(config["metadata"]["annotations"], {"grafana_folder": "Splice"})

    def test_a_release_with_everything_fits_into_its_secret(self):
        import base64
        import gzip
        everything = {key: {"enabled": True} for key in ("podMonitor", "prometheusRule", "rules", "dashboards")}
        release = "".join(render.render(values={"monitoring": everything}))
        release += "".join(base64.b64encode(p.read_bytes()).decode() for folder in (render.CHART, GRAFANA, PROMETHEUS)
                           for p in folder.rglob("*") if p.is_file())
        size = len(base64.b64encode(base64.b64encode(gzip.compress(release.encode()))))
        print(f"release: {size} bytes", file=sys.stderr)
        self.assertLess(size, RELEASE_SIZE // 2)

    def test_vllm_names_are_asked_of_routers_and_workers(self):
        for name, want in ((None, []), ("mine", ["--served-model-name=mine"])):
            values = {"monitoring": {"vllmMetricNames": True}, "model": {"servedName": name or ""}}
            for document in documents(values):
                if document["kind"] not in ("Deployment", "StatefulSet"):
                    continue
                container = document["spec"]["template"]["spec"]["containers"][0]
                given = [a for a in container["args"] if a.startswith(("--vllm-metric-names", "--served-model-name"))]
                self.assertEqual(given, [] if container["name"] == "store" else ["--vllm-metric-names=true"] + want
                                 if container["name"] != "router" else want + ["--vllm-metric-names=true"])

    def test_spans_leave_every_pod(self):
        values = {"tracing": {"endpoint": "http://collector.tracing.svc:4318", "sample": 0.01},
                  "networkPolicy": {"tracing": ELSEWHERE["clients"]}}
        found = documents(values)
        for document in found:
            if document["kind"] in ("Deployment", "StatefulSet"):
                container = document["spec"]["template"]["spec"]["containers"][0]
                given = [a for a in container["args"] if a.startswith(("--otlp", "--trace"))]
                self.assertEqual(given, ["--otlp-endpoint=http://collector.tracing.svc:4318"] +
                                 (["--trace-sample=0.01"] if container["name"] == "router" else []))
        policy = next(d for d in found if d["kind"] == "NetworkPolicy" and d["metadata"]["name"] == "splice-tracing")["spec"]
        self.assertEqual(policy["policyTypes"], ["Egress"])
        self.assertNotIn("app.kubernetes.io/component", policy["podSelector"]["matchLabels"])
        self.assertEqual(policy["egress"][1], {"to": ELSEWHERE["clients"], "ports": [{"port": 4318}]})
        self.assertEqual({p["port"] for p in policy["egress"][0]["ports"]}, {53})
        self.assertNotIn("splice-tracing", {d["metadata"]["name"] for d in documents({})})

    def test_what_a_pool_is_given_reaches_its_pods(self):
        for pool in ("router", "prefill", "decode", "store"):
            values = {pool: {"podLabels": {"team": "a"}, "priorityClassName": "high", "podAnnotations": {"note": "b"},
                             "env": [{"name": "X", "value": "y"}]}}
            pods = {d["metadata"]["name"]: d["spec"]["template"] for d in documents(values) if d["kind"] in ("Deployment", "StatefulSet")}
            for name, pod in pods.items():
                want = name == "splice-" + pool
                self.assertEqual(pod["metadata"]["labels"].get("team"), "a" if want else None)
                self.assertEqual(pod["metadata"]["annotations"].get("note"), "b" if want else None)
                self.assertEqual(pod["spec"].get("priorityClassName"), "high" if want else None)
                self.assertEqual({"name": "X", "value": "y"} in pod["spec"]["containers"][0].get("env", []), want)

    def test_tensor_parallel_workers_have_shared_memory(self):
        values = {"gpu": {"enabled": True}, "prefill": {"tp": 2}}
        for document in documents(values):
            if document["kind"] in ("Deployment", "StatefulSet"):
                pod = document["spec"]["template"]["spec"]
                sizes = [v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm"]
                mounts = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm"]
                want = document["metadata"]["name"] == "splice-prefill"
                self.assertEqual((sizes, len(mounts)), ([{"medium": "Memory", "sizeLimit": "1Gi"}], 1) if want else ([], 0))

    def test_ingress(self):
        values = {"ingress": {"enabled": True, "className": "nginx", "hosts": ["a.example.org", "b.example.org"],
                              "paths": ["/v1", "/ui"], "tlsSecret": "web", "annotations": {"own": "yes"}},
                  "networkPolicy": ELSEWHERE}
        ingress, = of_kind(values, "Ingress")
        spec = ingress["spec"]
        self.assertEqual(spec["ingressClassName"], "nginx")
        self.assertEqual(spec["tls"], [{"secretName": "web", "hosts": ["a.example.org", "b.example.org"]}])
        self.assertEqual([r["host"] for r in spec["rules"]], ["a.example.org", "b.example.org"])
        service = next(d for d in documents(values) if d["kind"] == "Service" and d["metadata"]["name"] == "splice-router")
        for rule in spec["rules"]:
            self.assertEqual([p["path"] for p in rule["http"]["paths"]], ["/v1", "/ui"])
            for path in rule["http"]["paths"]:
                self.assertEqual(path["backend"]["service"], {"name": "splice-router", "port": {"name": "http"}})
        self.assertIn("http", [p["name"] for p in service["spec"]["ports"]])
        nginx = {key.split("/")[1]: value for key, value in ingress["metadata"]["annotations"].items() if "/" in key}
        self.assertEqual(nginx, {"proxy-buffering": "off", "proxy-body-size": "0", "proxy-read-timeout": "610",
                                 "proxy-send-timeout": "610"})
        self.assertEqual(ingress["metadata"]["annotations"]["own"], "yes")

        values["ingress"] = {"enabled": True, "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "7"}}
        values |= {"publicTls": {"enabled": True}, "router": {"requestTimeoutMs": 1_500}}
        ingress, = of_kind(values, "Ingress")
        self.assertNotIn("tls", ingress["spec"])
        self.assertNotIn("host", ingress["spec"]["rules"][0])
        nginx = {key.split("/")[1]: value for key, value in ingress["metadata"]["annotations"].items()}
        self.assertEqual((nginx["proxy-read-timeout"], nginx["proxy-send-timeout"]), ("7", "12"))
        self.assertEqual(nginx["backend-protocol"], "HTTPS")

    def test_http_route(self):
        values = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "web", "namespace": "gateways", "sectionName": "https"}],
                                "hostnames": ["a.example.org"], "annotations": {"own": "yes"}}, "networkPolicy": ELSEWHERE}
        route, = of_kind(values, "HTTPRoute")
        self.assertEqual(route["apiVersion"], "gateway.networking.k8s.io/v1")
        self.assertEqual(route["metadata"]["annotations"], {"own": "yes"})
        self.assertEqual(route["spec"]["parentRefs"], values["httpRoute"]["parentRefs"])
        self.assertEqual(route["spec"]["hostnames"], ["a.example.org"])
        self.assertEqual(route["spec"]["rules"], [{
            "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
            "timeouts": {"request": "610s", "backendRequest": "610s"},
            "backendRefs": [{"name": "splice-router", "port": 8000}]}])


if __name__ == "__main__":
    unittest.main()
