"""What make_turns.py and make_eval.py write: the same every time, questions where they say, answers that follow.

Run from the source root: python3 tests/tools/train/make_turns_test.py
"""
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools" / "train"))
import bpe  # noqa: E402
import lexicon  # noqa: E402
import make_eval  # noqa: E402
import make_turns  # noqa: E402
import prose  # noqa: E402
import samples  # noqa: E402
import traces  # noqa: E402
import turns  # noqa: E402

TOKENIZER = bpe.Tokenizer(ROOT / "models" / "splice-tiny" / "tokenizer.json")


def run(*args):
    subprocess.run([sys.executable, ROOT / "tools" / "train" / "make_turns.py", *map(str, args)], check=True,
                   stdout=subprocess.DEVNULL)


def world(seed=1):
    words = make_turns.WORDS.read_text(encoding="utf-8").split()
    return samples.World("dev", words, lexicon.Filler(prose.text(seed, 600), TOKENIZER.count), TOKENIZER.count)


def turns_of(row):
    """The segments of each turn, from behind the last answer up to its own."""
    turn, answers = [], iter(row["answers"])
    for segment in row["segments"]:
        if segment["type"] == "answer":
            yield turn, next(answers)
            turn = []
        else:
            turn.append(segment)


class CommittedSets(unittest.TestCase):
    def test_are_what_the_generator_makes(self):
        with tempfile.TemporaryDirectory() as folder:
            run("sets", "--out", folder, "--lengths", 2048, "--samples", 3, "--shapes", "growing", "shared")
            run("sets", "--out", folder, "--lengths", 2048, "--samples", 1, "--shapes", "quiz")
            for shape in turns.SHAPES:
                made = (pathlib.Path(folder) / f"{shape}.jsonl").read_bytes()
                self.assertEqual(made, (ROOT / "tests" / "evals" / f"{shape}.jsonl").read_bytes(), shape)

    def test_are_small(self):
        size = sum(f.stat().st_size for f in (ROOT / "tests" / "evals").glob("*.jsonl"))
        self.assertLess(size, 300_000)


class Sets(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rows = []
        w = world()
        for shape in turns.SHAPES:
            for family in turns.FAMILIES:
                for length, samples_each in ((2048, 2), (4096, 1)):
                    for i in range(samples_each):
                        rng = turns.rng_of(7, shape, family, length, i)
                        sample = turns.draw(rng, w, length, shape, family, i)
                        cls.rows.append(make_turns.record(sample, length, i, TOKENIZER))

    def test_lengths(self):
        for row in self.rows:
            self.assertLessEqual(row["length_tokens"], row["length"], row["id"])
            self.assertGreater(row["length_tokens"], 0.6 * row["length"], row["id"])
            self.assertEqual(len(row["answers"]), turns.NUM_TURNS[row["meta"]["shape"]], row["id"])

    def test_questions_stand_where_they_should(self):
        seen = set()
        for row in self.rows:
            for (segments, _), position in zip(turns_of(row), row["meta"]["positions"]):
                # The system message opens the first turn.
                kinds = [(s["type"], "?" in s["text"] and s["type"] == "new") for s in segments
                         if not s["text"].startswith("<|begin_of_text|>")]
                asked = [i for i, (_, is_question) in enumerate(kinds) if is_question]
                self.assertEqual(len(asked), 1, row["id"])
                before = [k for k, _ in kinds[:asked[0]] if k == "reuse"]
                behind = [k for k, _ in kinds[asked[0]:] if k == "reuse"]
                if position == "end":
                    self.assertEqual(behind, [], row["id"])
                elif position == "begin":
                    self.assertEqual(before, [], row["id"])
                    self.assertTrue(behind, row["id"])
                else:
                    self.assertTrue(before and behind, (row["id"], kinds))
                seen.add((row["meta"]["shape"], position))
        self.assertEqual(seen, {("growing", p) for p in turns.POSITIONS} | {("shared", p) for p in turns.POSITIONS}
                         | {("quiz", "begin"), ("quiz", "middle"), ("quiz", "end")})

    def test_answers_follow_from_the_text_in_front(self):
        for row in self.rows:
            text = ""
            for segments, answer in turns_of(row):
                text += "".join(s["text"] for s in segments)
                question = re.findall(r"[^\n>?]*\?[^\n<]*", text)[-1]
                self.assertEqual(self.solve(row["meta"]["family"], question, text), answer, (row["id"], question))
                text += answer

    def solve(self, family, question, text):
        """The answer by looking facts up, without the generator's own books."""
        text = text.replace("\n", " ")
        if family.startswith("niah"):
            keys = re.split(r", and | and |, ", re.search(r"numbers? for (.*) mentioned", question)[1])
            found = [re.search(rf"magic numbers for {re.escape(k)} is: (\d+)\.", text)[1] for k in keys]
            long = family == "niah_long"
            return f"The special magic number for {keys[0]} is {found[0]}." if long else ", ".join(found)
        if family == "names":
            return re.search(rf"{re.search('married to (.*)[?]', question)[1]} is married to ([A-Za-z ]+)\.", text)[1]
        if family.startswith("vt"):
            path = ["VAR " + re.search(r"VAR (\w+)\?", question)[1]]
            while path[-1].startswith("VAR "):
                path.append(re.search(rf"{path[-1]} = ((?:VAR )?\w+)\.", text)[1])
            return " = ".join(path) if family == "vt_long" else path[-1]
        person = re.search(r"does (.*) work", question)[1]
        company = re.search(rf"{person} works at company (\w+)\.", text)[1]
        works = f"{person} works at company {company}."
        if "company" in question:
            return works if family == "qa_long" else company
        town = re.search(rf"Company {company} is based in town (\w+)\.", text)[1]
        lies = f"Company {company} is based in town {town}."
        return f"{works} {lies} The answer is {town}." if family == "qa_long" else town


class EvaluationSets(unittest.TestCase):
    """The sets of one turn a task, as the model came with."""

    def test_every_set_is_drawn_the_same_twice(self):
        w = world()
        for name in make_eval.SETS:
            rows = [make_eval.draw(name, random.Random(f"3/{name}"), w, 1024, 0, "dev", TOKENIZER)
                    for _ in range(2)]
            self.assertEqual(json.dumps(rows[0]), json.dumps(rows[1]), name)
            self.assertLessEqual(rows[0]["length_tokens"], 1024, name)


class Traces(unittest.TestCase):
    def test_turns_share_their_history(self):
        for name in traces.SETS:
            requests = traces.conversations(name, 40, 3, 10 ** 9, 1.0, 5.0)
            self.assertEqual(requests, traces.conversations(name, 40, 3, 10 ** 9, 1.0, 5.0))
            self.assertEqual(len(requests), 40 * traces.SETS[name][1])
            self.assertEqual(requests, sorted(requests, key=lambda r: r["timestamp"]))
            last = {}
            for r in requests:
                self.assertEqual(len(r["hash_ids"]), -(-r["input_length"] // traces.BLOCK_TOKENS))
                before = last.get(r["conversation"])
                if before:
                    self.assertEqual(r["turn"], before["turn"] + 1)
                    self.assertGreater(r["input_length"], before["input_length"] + before["output_length"])
                    self.assertEqual(r["hash_ids"][:len(before["hash_ids"])], before["hash_ids"])
                last[r["conversation"]] = r
            ids = [set(r["hash_ids"]) for r in last.values()]
            self.assertEqual(len(set.union(*ids)), sum(map(len, ids)))  # conversations share nothing

    def test_lengths_are_those_of_the_table(self):
        for name, (_, _, average) in traces.SETS.items():
            requests = traces.conversations(name, 400, 5, 10 ** 9, 1.0, 5.0)
            totals = {r["conversation"]: r["input_length"] + r["output_length"] for r in requests}
            # Standard error of the mean: SIGMA / sqrt(400) = 1.8 %; the seed is fixed.
            self.assertLess(abs(sum(totals.values()) / len(totals) / average - 1), 0.07, name)

    def test_the_longest_are_cut(self):
        requests = traces.conversations("nqa", 50, 1, 16000, 1.0, 5.0)
        self.assertLessEqual(max(r["input_length"] + r["output_length"] for r in requests), 16000)


if __name__ == "__main__":
    unittest.main()
