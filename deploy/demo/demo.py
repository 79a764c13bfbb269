#!/usr/bin/env python3
"""Shows on this machine, in less than a minute, what Splice is for. Needs the programs (./dev demo builds them).

One question about twenty documents is asked four ways: new, the same prompt again, in another order with new documents
among them (and, to compare, that prompt without reuse), and with a quarter of the documents' KV. Then a decode worker is
killed while it streams. Figures are those of the answers' receipts. The exit status is 1 if an answer is wrong or a
stream breaks.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time

import cluster
import documents

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEED = 4
NUM_NEW = 3
SENTENCES = 9  # of prose in each document, which nobody asks about
QUARTER = {"reuse": "samkv", "budget_ratio": 0.25, "compact": True}


class Story:
    """The documents in the orders in which they are asked, and the question."""

    def __init__(self, seed):
        rng = random.Random(f"story/{seed}")
        known = documents.Library(seed, 8, 6, 6, SENTENCES)
        new = documents.Library(seed + 1000, 1, 1, 1, SENTENCES)
        self.question = known.questions[0]
        titles = list(known.documents)
        rng.shuffle(titles)
        self.first = [known.documents[title] for title in titles]
        # No order begins as another one does: no prefix helps.
        self.other = self.first[7:] + self.first[:7]
        spare = [title for title in titles if title not in self.question.titles][:NUM_NEW]
        mixed = [known.documents[title] for title in reversed(titles) if title not in spare]
        for document in new.documents.values():
            mixed.insert(rng.randint(1, len(mixed)), document)
        self.mixed = mixed


def request(some_documents, question, max_tokens, **splice):
    parts = [{"type": "text", "text": documents.INSTRUCTION}]
    parts += [{"type": "segment", "text": f"<|seg|>{document}\n"} for document in some_documents]
    parts += [{"type": "text", "text": question}]
    return {"messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": parts}],
            "temperature": 0, "max_tokens": max_tokens, "splice": splice}


def ways(story):
    """(name, documents, options, what must be so in the receipt and in words)."""
    yield "new", story.first, {"reuse": "exact"}, lambda r: r["tokens"]["cached"] == 0, "nothing was known"
    yield ("the same again", story.first, {"reuse": "exact"}, lambda r: r["tokens"]["cached"] > 0.9 * r["tokens"]["prompt"],
           "its prefix was reused")
    yield (f"other order, {NUM_NEW} new among", story.mixed, {}, lambda r: r["tokens"]["aligned"] > 0.7 * r["tokens"]["prompt"],
           "the known documents were reused")
    yield ("  the same without reuse", story.mixed, {"reuse": "exact"}, lambda r: r["tokens"]["computed"] > 0.9 * r["tokens"]["prompt"],
           "everything was computed")
    yield "a quarter of the KV", story.other, QUARTER, lambda r: r["samkv"]["kept_share"] < 0.33, "a third at most was kept"


def ask_all(running, story, show):
    """Asks every way; [(row, what is wrong with it or None)]."""
    rows = []
    for name, order, options, holds, claim in ways(story):
        text, receipt = running.ask(request(order, story.question.text, 16, **options))
        tokens = receipt["tokens"]
        row = {"way": name, "method": receipt["reuse"], "answer": text, "right": text == story.question.answer,
               "prompt_tokens": tokens["prompt"], "cached": tokens["cached"], "aligned": tokens["aligned"],
               "recomputed": tokens["recomputed"], "computed": tokens["computed"], "kv_moved_bytes": receipt["bytes"]["moved"],
               "ttft_ms": receipt["seconds"]["ttft"] * 1e3}
        if "samkv" in receipt:
            row["kept_share"] = receipt["samkv"]["kept_share"]
        wrong = None
        if not row["right"]:
            wrong = f"{name.strip()}: the answer is {text!r}, and the documents say {story.question.answer!r}"
        elif not holds(receipt):
            wrong = f"{name.strip()}: the receipt does not say that {claim}: {receipt}"
        rows.append((row, wrong))
        show(row)
    return rows


class Killer:
    """Watches a stream; once a third of the answer is there, kills the decode worker that it comes from."""

    def __init__(self, running, expected):
        self.running, self.expected = running, expected
        self.victim, self.before = None, ""
        self.last, self.pause = None, 0.0

    def __call__(self, text):
        now = time.monotonic()
        if self.last is not None:
            self.pause = max(self.pause, now - self.last)
        self.last = now
        if self.victim is None and 3 * len(text) >= len(self.expected):
            self.before = text
            active = self.running.get("/control/v1/requests")["active"]
            if not active:
                raise RuntimeError("the answer was over before its decode worker could be killed")
            self.victim = active[0]["workers"]["decode"]
            self.running.programs[self.victim].kill()


def break_stream(running, story):
    """(what happened, what is wrong with it or None)."""
    body = request(story.first, story.question.text + " Explain your answer.", 64, reuse="exact")
    undisturbed, _ = running.ask(body)
    killer = Killer(running, undisturbed)
    text, receipt = running.ask(body, killer)
    result = {"undisturbed": undisturbed, "text": text, "before": killer.before, "killed": killer.victim,
              "went_on_at": receipt["workers"]["decode"], "migrations": receipt["migrations"], "longest_pause_ms": killer.pause * 1e3}
    wrong = None
    if text != undisturbed:
        wrong = f"the stream with a dead worker says {text!r}, and without {undisturbed!r}"
    elif not text.endswith(f"The answer is {story.question.answer}."):
        wrong = f"the stream says {text!r}, and the answer is {story.question.answer!r}"
    elif receipt["migrations"] != 1:
        wrong = f"the stream was over before {killer.victim} was dead: nothing was shown"
    return result, wrong


# What is printed

class Paper:
    """Prints as the demo goes: with colour and boxes on a terminal that is wide enough, plain otherwise."""

    COLUMNS = (("", 27), ("method", 7), ("answer", 16), ("computed", 8), ("KV moved", 8), ("first token", 11))
    BAR = 24
    CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}

    def __init__(self, stream):
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.stream = stream
        self.colour = terminal and not os.environ.get("NO_COLOR")
        width = sum(size for _, size in self.COLUMNS) + 3 * len(self.COLUMNS) + 1
        columns = shutil.get_terminal_size().columns
        utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
        self.boxes = terminal and utf8 and columns >= width
        self.bars = self.boxes and columns >= width + self.BAR + 2
        self.number = 0
        self.longest = None

    def paint(self, text, *styles):
        if not self.colour or not styles:
            return text
        return f"\033[{';'.join(self.CODES[style] for style in styles)}m{text}\033[0m"

    def say(self, text="", *styles):
        print(self.paint(text, *styles), file=self.stream, flush=True)

    def edge(self, left, middle, right):
        if self.boxes:
            self.say(left + middle.join("─" * (size + 2) for _, size in self.COLUMNS) + right, "dim")

    def cells(self, texts, styles, tail=""):
        parts = []
        for index, (text, (_, size), style) in enumerate(zip(texts, self.COLUMNS, styles)):
            parts.append(self.paint(text.rjust(size) if index > 2 else text.ljust(size), *style))
        if self.boxes:
            bar = self.paint("│", "dim")
            self.say(f"{bar} " + f" {bar} ".join(parts) + f" {bar}{tail}")
        else:
            self.say("  ".join(parts).rstrip())

    def begin_table(self):
        self.edge("┌", "┬", "┐")
        self.cells([title for title, _ in self.COLUMNS], [("bold",)] * len(self.COLUMNS))
        self.edge("├", "┼", "┤")

    def row(self, row):
        aside = row["way"].startswith(" ")
        self.number += not aside
        self.longest = max(self.longest or 0, row["ttft_ms"])
        name = row["way"] if aside else f"{self.number} {row['way']}"
        mark = ("✓" if row["right"] else "✗") if self.boxes else ("" if row["right"] else "WRONG")
        tail = ""
        if self.bars:
            tail = " " + self.paint("█" * max(1, round(self.BAR * row["ttft_ms"] / self.longest)), "dim" if aside else "cyan")
        style = ("dim",) if aside else ()
        self.cells([name, row["method"], f"{row['answer']} {mark}".strip(), f"{row['computed']:,}",
                    f"{row['kv_moved_bytes'] / 1e6:.1f} MB", f"{row['ttft_ms']:,.0f} ms"],
                   [style, style, ("green",) if row["right"] else ("red", "bold"), style, style, style or ("bold",)], tail)

    def end_table(self, rows):
        self.edge("└", "┴", "┘")
        new, again, mixed, without, quarter = rows
        self.say(f"  2  Every engine reuses a prefix: the prompt has to begin as an earlier one did. {again['cached']:,} of "
                 f"{again['prompt_tokens']:,} tokens.")
        self.say(f"  3  Splice moves the KV of {mixed['aligned']:,} tokens to their new places, and computes {mixed['recomputed']:,} of "
                 "them again in part.")
        self.say(f"     The first token comes after {mixed['ttft_ms'] / without['ttft_ms']:.0%} of the time that it takes without.")
        self.say(f"  4  Of the documents {quarter['kept_share']:.0%} are kept, those parts that the question needs: "
                 f"{quarter['kv_moved_bytes'] / new['kv_moved_bytes']:.0%} of the bytes.")

    def stream_result(self, result):
        kept, rest = result["before"], result["text"][len(result["before"]):]
        self.say(f"  {self.paint(kept, 'cyan')}{self.paint('✗' if self.boxes else '|', 'red', 'bold')}{self.paint(rest, 'green')}")
        self.say(f"  {result['killed']} was killed there (kill -9); {result['went_on_at']} went on in the same stream. Longest pause "
                 f"{result['longest_pause_ms']:.0f} ms.")


def run(paper, running, began, story):
    """(result as JSON, what went wrong)."""
    paper.say(f"  ready after {time.monotonic() - began:.1f} s: a store, a prefill worker, two decode workers, a router; "
              "ports are free ones on loopback", "dim")
    paper.say()
    paper.say(f"One question about {len(story.first)} documents: {story.question.text}", "bold")
    paper.say(f"  Two of them say it: {story.question.titles[0]} works at {story.question.titles[1]}, which is based in "
              f"{story.question.answer}.")
    paper.begin_table()
    rows = ask_all(running, story, paper.row)
    mistakes = [wrong for _, wrong in rows if wrong]
    paper.end_table([row for row, _ in rows])
    paper.say()
    paper.say("A decode worker dies in the middle of an answer", "bold")
    stream, wrong = break_stream(running, story)
    paper.stream_result(stream)
    if wrong:
        mistakes.append(wrong)
    else:
        paper.say("  The text is that of the undisturbed stream.")
    return {"question": story.question.text, "right_answer": story.question.answer, "ways": [row for row, _ in rows],
            "stream": stream, "mistakes": mistakes, "seconds": time.monotonic() - began}, mistakes


def stop(number, _):
    sys.exit(128 + number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=ROOT / "build" / "bin", type=pathlib.Path, help="folder of the programs")
    parser.add_argument("--seed", default=SEED, type=int, help="of documents and question; splice-tiny does not know every answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    flags = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    paper = Paper(sys.stderr if flags.json else sys.stdout)
    began = time.monotonic()
    paper.say("Splice on this machine, with splice-tiny, a test model of 23 million parameters", "bold")
    programs = cluster.Cluster(flags.bin, ROOT / "models" / "splice-tiny")
    try:
        with programs as running:
            result, mistakes = run(paper, running, began, Story(flags.seed))
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, RuntimeError) as error:
        sys.exit("\n".join([f"the demo stopped: {error}", *programs.ended]))
    if flags.json:
        print(json.dumps(result, indent=1))
    for mistake in mistakes:
        paper.say(f"WRONG: {mistake}", "red", "bold")
    if mistakes:
        sys.exit(1)
    paper.say()
    paper.say("Try it yourself", "bold")
    paper.say("  build/bin/splice serve --model models/splice-tiny      # a cluster in one process")
    paper.say("  docs/first-hour.md                                     # step by step")


if __name__ == "__main__":
    main()
