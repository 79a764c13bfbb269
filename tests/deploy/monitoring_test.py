"""Alerts and dashboards: every metric and label they use is in docs/metrics.md, every alert has a runbook, files are current."""
import json
import re
import sys
import unittest

import tools

tools.need("yaml")
sys.path.insert(0, str(tools.ROOT / "deploy" / "grafana"))
import make_dashboards  # noqa: E402
import metrics  # noqa: E402

PROMETHEUS = tools.ROOT / "deploy" / "prometheus"
RUNBOOKS = tools.ROOT / "docs" / "runbooks"
SECTIONS = ["## Symptom", "## Where to look", "## What to do"]


def scrape_labels():
    """What prometheus.yml adds to every series."""
    config = tools.load_documents((PROMETHEUS / "prometheus.yml").read_text())[0]
    rules = config["scrape_configs"][0]["relabel_configs"]
    return {"job", "instance"} | {rule["target_label"] for rule in rules if "target_label" in rule}


def alerts():
    groups = tools.load_documents((PROMETHEUS / "alerts.yml").read_text())[0]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def expressions():
    """(where, PromQL) of every alert and panel."""
    for name, rule in alerts().items():
        yield name, rule["expr"]
    for name, text in make_dashboards.texts().items():
        for panel in json.loads(text)["panels"]:
            for target in panel["targets"]:
                yield f"{name} {panel['title']}", target["expr"]


class MonitoringTest(unittest.TestCase):
    def setUp(self):
        self.table = metrics.read_table()

    def test_every_metric_exists(self):
        used = set()
        for where, expression in expressions():
            with self.subTest(where):
                used |= metrics.names_in(expression, self.table)
        self.assertGreater(len(used), 50)

    def test_every_metric_can_be_seen(self):
        seen = set()
        for where, expression in expressions():
            if where.split()[0].endswith(".json"):
                seen |= metrics.names_in(expression, self.table)
        self.assertEqual(set(self.table) - seen, set(), "on no dashboard")

    def test_selected_labels_and_values_exist(self):
        scraped = scrape_labels()
        components = set(metrics.PROGRAM_OF_FOLDER.values())
        for where, expression in expressions():
            for name, selector in re.findall(r"(splice_\w+)\{([^}]*)\}", expression):
                metric = self.table[(metrics.names_in(name, self.table)).pop()]
                for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', selector):
                    with self.subTest(f"{where}: {name} {label}"):
                        self.assertIn(label, set(metric.labels) | scraped | {"le"})
                        known = metric.programs & components if label == "component" else metric.labels.get(label)
                        if known and "$" not in value:
                            self.assertLessEqual(set(value.split("|")), known)

    def test_legends_name_labels_that_are_grouped_by(self):
        for name, text in make_dashboards.texts().items():
            for panel in json.loads(text)["panels"]:
                for target in panel["targets"]:
                    for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                        by = "".join(re.findall(r"by \(([^)]*)\)", target["expr"]))
                        self.assertTrue(label in by or "by (" not in target["expr"], f"{name} {panel['title']}: {label}")

    def test_dashboards_are_current_and_apart(self):
        texts = make_dashboards.texts()
        for name, text in texts.items():
            self.assertEqual((make_dashboards.HERE / name).read_text(), text,
                             f"{name} is stale: run deploy/grafana/make_dashboards.py")
        self.assertEqual({p.name for p in make_dashboards.HERE.glob("*.json")}, set(texts))
        self.assertEqual(len({json.loads(text)["uid"] for text in texts.values()}), len(texts))

    def test_every_alert_has_a_runbook_and_every_runbook_an_alert(self):
        for name, rule in alerts().items():
            self.assertIn(rule["labels"]["severity"], {"critical", "warning", "info"})
            self.assertEqual(rule["annotations"]["runbook"], f"docs/runbooks/{name}.md")
            text = (RUNBOOKS / f"{name}.md").read_text()
            with self.subTest(name):
                self.assertTrue(text.startswith(f"# {name}\n"))
                self.assertEqual([line for line in text.splitlines() if line.startswith("## ")], SECTIONS)
                for metric in set(re.findall(r"`(splice_\w+)", text)):
                    metrics.names_in(metric, self.table)
        self.assertEqual({p.stem for p in RUNBOOKS.glob("*.md")} - {"README"}, set(alerts()))
        index = (RUNBOOKS / "README.md").read_text()
        self.assertEqual(set(re.findall(r"\((\w+)\.md\)", index)), set(alerts()))


if __name__ == "__main__":
    unittest.main()
