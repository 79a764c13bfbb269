"""docs/metrics.md lists what the programs register, no more and no less."""
import re
import unittest

import metrics


class MetricsTest(unittest.TestCase):
    def setUp(self):
        self.table = metrics.read_table()
        self.sources = metrics.scan_sources()

    def test_the_scan_finds_the_metrics(self):
        # A scan that finds nothing would agree with an empty table.
        self.assertGreater(len(self.sources), 60)
        self.assertEqual(self.sources["splice_store_hits_total"],
                         metrics.Metric("counter", {"tier": {"memory", "disk"}}, {"store"}))
        self.assertEqual(set(self.sources["splice_fidelity_cosine"].labels), {"stage", "method"})

    def test_every_metric_of_the_sources_is_in_the_table(self):
        self.assertEqual(sorted(set(self.sources) - set(self.table)), [])

    def test_every_metric_of_the_table_is_in_the_sources(self):
        self.assertEqual(sorted(set(self.table) - set(self.sources)), [])

    def test_types_labels_and_programs_agree(self):
        for name, found in self.sources.items():
            listed = self.table[name]
            with self.subTest(name):
                self.assertEqual(listed.type, found.type)
                self.assertEqual(set(listed.labels), set(found.labels))
                for label, values in found.labels.items():
                    self.assertLessEqual(values, listed.labels[label], f"values of {label}")
                self.assertLessEqual(found.programs, listed.programs)
                self.assertLessEqual(listed.programs, set(metrics.PROGRAM_OF_FOLDER.values()))
                self.assertEqual(name.endswith("_total"), found.type == "counter")

    def test_names_of_vllm_are_those_of_the_table(self):
        source = (metrics.ROOT / "services" / "base" / "vllm_metrics.cc").read_text()
        constants = dict(re.findall(r'(k\w+)\[\]\s*=\s*"(splice_\w+)"', (metrics.ROOT / "services/base/metrics.h").read_text()))
        found = {vllm: constants[own] for vllm, own in re.findall(r'\{"(vllm:\w+)",\s*metric::(k\w+)\}', source)}
        self.assertGreater(len(found), 10)
        sums = re.findall(r'= "(vllm:\w+)"', source)
        self.assertEqual(len(sums), 2)
        found |= dict.fromkeys(sums, "splice_reuse_tokens_total")
        self.assertEqual(metrics.read_vllm_table(), found)
        self.assertLessEqual(set(found.values()), set(self.table))

    def test_a_wrong_row_is_noticed(self):
        row = "| `splice_x` | gauge | | bytes | store | what it is |\n"
        self.assertEqual(metrics.read_table(row)["splice_x"].programs, {"store"})
        starred = metrics.read_table(row.replace("store", "prefill, decode*"))["splice_x"]
        self.assertEqual((starred.programs, starred.local_prefill), ({"prefill", "decode"}, True))
        with self.assertRaises(ValueError):
            metrics.read_table(row + row)
        with self.assertRaises(ValueError):
            metrics.read_table("| `splice_x` | gauge | | | store | no unit |\n")
        with self.assertRaises(KeyError):
            metrics.names_in("rate(splice_kv_pages_used_bucket[5m])", self.table)


if __name__ == "__main__":
    unittest.main()
