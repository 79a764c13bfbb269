"""What promtool says of the alerts, of their unit tests, and of every query of the dashboards."""
import json
import re
import shutil
import subprocess
import sys
import tempfile
import pathlib
import unittest

import tools

tools.need("yaml")
import yaml  # noqa: E402

sys.path.insert(0, str(tools.ROOT / "deploy" / "grafana"))
import make_dashboards  # noqa: E402

PROMETHEUS = tools.ROOT / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=tools.CHART_TOOLS)
if PROMTOOL is None:
    tools.skip("promtool is not installed (./dev charts installs it)")


class PromtoolTest(unittest.TestCase):
    def promtool(self, *arguments):
        done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_alerts_are_valid(self):
        self.promtool("check", "rules", PROMETHEUS / "alerts.yml")

    def test_alerts_fire_when_they_should(self):
        self.promtool("test", "rules", PROMETHEUS / "alerts_test.yml")

    def test_the_configuration_is_valid(self):
        # Some packages of promtool are built without Kubernetes: what it would find is left out, what is done with it is checked.
        config = tools.load_documents((PROMETHEUS / "prometheus.yml").read_text())[0]
        self.assertEqual(config["scrape_configs"][0].pop("kubernetes_sd_configs"), [{"role": "pod"}])
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "prometheus.yml"
            path.write_text(yaml.safe_dump(config))
            self.promtool("check", "config", path)

    def test_queries_of_the_dashboards_parse(self):
        rules = []
        for text in make_dashboards.texts().values():
            for panel in json.loads(text)["panels"]:
                for target in panel["targets"]:
                    expression = re.sub(r"\$__rate_interval", "5m", target["expr"])
                    rules.append({"record": f"query:{len(rules)}", "expr": expression})
        self.assertGreater(len(rules), 80)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rules.yml"
            path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
            self.promtool("check", "rules", path)


if __name__ == "__main__":
    unittest.main()
