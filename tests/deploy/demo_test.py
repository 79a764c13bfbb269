#!/usr/bin/env python3
"""The demo: that its answers are right and its stream goes on, that it fails when they are not, and leaves nothing behind."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = os.environ.get("SPLICE_BIN_DIR", str(ROOT / "build" / "bin"))
COMMAND = [str(ROOT / "deploy" / "demo" / "run.sh"), "--bin", BIN]
sys.path.insert(0, str(ROOT / "deploy" / "demo"))
import demo  # noqa: E402


class Demo(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.environment = {**os.environ, "TMPDIR": self.folder.name}

    def start(self, *flags):
        return subprocess.Popen([*COMMAND, *flags], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)

    def assert_nothing_left(self, process):
        self.assertEqual(os.listdir(self.folder.name), [])
        with self.assertRaises(ProcessLookupError):
            os.killpg(process.pid, 0)

    def test_every_way_answers_and_the_stream_goes_on(self):
        process = self.start("--json")
        output, log = process.communicate()
        self.assertEqual(process.returncode, 0, log)
        result = json.loads(output)
        new, again, mixed, without, quarter = result["ways"]
        self.assertEqual({way["answer"] for way in result["ways"]}, {result["right_answer"]})
        self.assertLess(again["computed"], 0.1 * new["computed"])
        self.assertLess(mixed["computed"], 0.3 * without["computed"])
        self.assertLess(quarter["kv_moved_bytes"], new["kv_moved_bytes"] / 3)
        stream = result["stream"]
        self.assertEqual((stream["text"], stream["migrations"]), (stream["undisturbed"], 1))
        self.assertNotIn(stream["before"], ("", stream["text"]))
        self.assertNotEqual(stream["killed"], stream["went_on_at"])
        self.assertNotIn("\033", log)
        self.assert_nothing_left(process)

    def test_leaves_nothing_behind_when_it_is_stopped(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.start()
            while "ready after" not in process.stdout.readline():
                self.assertIsNone(process.poll())
            # As a terminal does: to every program.
            os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
            process.communicate()
            self.assertEqual(process.returncode, 128 + number)
            self.assert_nothing_left(process)

    def test_says_how_a_program_ended(self):
        process = self.start()
        while not process.stdout.readline().startswith("1 new"):
            self.assertIsNone(process.poll())
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        prefill, = [pid for pid in children if b"splice-prefill" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(prefill), signal.SIGABRT)
        _, log = process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn("prefill-0 was ended by SIGABRT:", log)
        self.assertIn("prefill.ready", log)
        self.assertNotIn("store ended", log)
        self.assert_nothing_left(process)

    def test_says_which_program_is_missing(self):
        done = subprocess.run([*COMMAND[:1], "--bin", self.folder.name], env=self.environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("splice-kvstore", done.stderr)
        self.assertEqual(os.listdir(self.folder.name), [])


class Answers:
    """Stands in for a cluster: one answer to everything."""

    def __init__(self, text, cached, migrations=1):
        self.text = text
        self.receipt = {"reuse": "exact", "tokens": {"prompt": 100, "cached": cached, "aligned": 100, "recomputed": 0, "computed": 100},
                        "bytes": {"moved": 1}, "seconds": {"ttft": 1}, "samkv": {"kept_share": 0.25}, "workers": {"decode": "decode-1"},
                        "migrations": migrations}
        self.programs = {"decode-0": self}

    def ask(self, body, on_text=None):
        if on_text:
            on_text(self.text)
        return self.text, self.receipt

    def get(self, path):
        return {"active": [{"workers": {"decode": "decode-0"}}]}

    def kill(self):
        pass


class Judgement(unittest.TestCase):
    def setUp(self):
        self.story = demo.Story(demo.SEED)
        self.answer = self.story.question.answer

    def mistakes(self, running):
        return [wrong for _, wrong in demo.ask_all(running, self.story, lambda row: None)]

    def test_a_wrong_answer_is_a_mistake(self):
        for wrong in self.mistakes(Answers("Nowhere", 0)):
            self.assertIn("'Nowhere'", wrong)

    def test_a_way_that_did_not_happen_is_a_mistake(self):
        new, again, mixed, without, quarter = self.mistakes(Answers(self.answer, 0))
        self.assertEqual((new, mixed, without, quarter), (None, None, None, None))
        self.assertIn("prefix", again)

    def test_a_stream_must_be_right_and_must_have_moved(self):
        right = f"The answer is {self.answer}."
        self.assertIsNone(demo.break_stream(Answers(right, 0), self.story)[1])
        self.assertIn("Nowhere", demo.break_stream(Answers("Nowhere", 0), self.story)[1])
        self.assertIn("nothing was shown", demo.break_stream(Answers(right, 0, migrations=0), self.story)[1])

    def test_orders_do_not_begin_alike(self):
        orders = (self.story.first, self.story.mixed, self.story.other)
        self.assertEqual([len(order) for order in orders], [20, 20, 20])
        self.assertEqual(len({order[0] for order in orders}), 3)
        self.assertEqual(len(set(self.story.mixed) - set(self.story.first)), demo.NUM_NEW)


if __name__ == "__main__":
    unittest.main()
