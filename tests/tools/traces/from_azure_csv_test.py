"""Times, lengths and bad lines of tools/traces/from_azure_csv.py."""
import json
import lzma
import os
import subprocess
import sys
import tempfile
import unittest

TOOL = os.path.join(os.path.dirname(__file__), "../../../tools/traces/from_azure_csv.py")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


class FromAzureCsv(unittest.TestCase):
    def convert(self, text, packed=False):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "t.csv.xz" if packed else "t.csv")
            with lzma.open(path, "wt") if packed else open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True, check=False)

    def test_times_begin_at_zero_and_have_milliseconds(self):
        text = HEADER + "2023-11-16 23:59:59.9990000,374,44\r\n2023-11-17 00:00:01.2505900,396,109\n"
        for packed in (False, True):
            done = self.convert(text, packed)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([json.loads(line) for line in done.stdout.splitlines()],
                             [{"timestamp": 0, "input_length": 374, "output_length": 44},
                              {"timestamp": 1252, "input_length": 396, "output_length": 109}])

    def test_requests_without_tokens_are_left_out(self):
        done = self.convert(HEADER + "2023-11-16 00:00:00,0,44\n2023-11-16 00:00:01,7,0\n2023-11-16 00:00:02,7,1\n")
        self.assertEqual([json.loads(line)["timestamp"] for line in done.stdout.splitlines()], [2000])

    def test_bad_lines_are_named(self):
        for text, said in ((HEADER + "2023-11-16 00:00:00,1\n", "t.csv:2"),
                           (HEADER + "2023-11-16 00:00:00,1,2\nyesterday,1,2\n", "t.csv:3"), ("a,b,c\n", "t.csv:1"),
                           ("", "t.csv:1")):
            done = self.convert(text)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(said, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
