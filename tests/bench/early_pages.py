"""Time to the first and the second token of prompts made of copies, by two builds of the prefill worker.

  python3 tests/bench/early_pages.py --bin build/bin --before OTHER/splice-prefill [--kv-transport shm] [--tokens 4096]

Router, prefill and decode worker are processes of this machine. Both builds get every prompt, in random order, so that
they see the same machine: compare pairs. The second token needs all KV at the decode worker, the first one does not.
"""
import argparse
import contextlib
import random
import statistics
import time

from worker_processes import cluster, complete


def ask(http, ids, segments, policy):
    """The receipt, the text, and the time until two tokens were there."""
    splice = {"reuse": policy, "segments": [{"begin": begin, "end": end, "namespace": "docs"} for begin, end in segments]}
    answer, seconds = complete(http, ids, 2, splice=splice)
    return answer["splice"], answer["choices"][0]["text"], seconds


def words(rng, count):
    return [33 + rng.randrange(4000) for _ in range(count)]


class Work:
    """Documents that the workers know, and prompts of them."""

    def __init__(self, kind, tokens, rng):
        self.rng = rng
        count = {"same": 1, "apart": 8, "mixed": 5}[kind]
        lengths = [tokens // count] * count if kind != "mixed" else [tokens // 2] + [tokens // 8] * 4
        self.lead = 100 if kind == "apart" else 20  # more than 64 tokens in front are another context
        self.documents = [words(rng, length) for length in lengths]

    def known(self):
        return [(words(self.rng, 20) + text + words(self.rng, 20), [(20, 20 + len(text))]) for text in self.documents]

    def prompt(self):
        documents = list(self.documents)
        if self.lead > 64:
            self.rng.shuffle(documents)
        ids, segments = words(self.rng, self.lead), []
        for text in documents:
            segments.append((len(ids), len(ids) + len(text)))
            ids += text
        return ids + words(self.rng, 64), segments


def spread(values):
    return f"{min(values):.1f} to {max(values):.1f}"


def measure(args, kind, policy, rng):
    """Both builds, started anew: how fast a process is depends on where its memory is. Times in milliseconds."""
    with contextlib.ExitStack() as stack:
        way = ["--kv-transport", args.kv_transport]
        clusters = {}
        for name, program in [("before", args.before), ("after", f"{args.bin}/splice-prefill")]:
            started = cluster(args.bin, program, [*way, "--kv-bytes", "1536MiB"], [*way, "--kv-bytes", "512MiB"])
            clusters[name] = stack.enter_context(started)[0]["http"]
        jobs = Work(kind, args.tokens, rng)
        for ids, segments in jobs.known():
            for http in clusters.values():
                ask(http, ids, segments, "exact")
        times = {name: {"first token": [], "two tokens": []} for name in clusters}
        for number in range(-2, args.rounds):
            ids, segments = jobs.prompt()
            order = list(clusters.items())
            rng.shuffle(order)
            texts = set()
            for name, http in order:
                receipt, text, seconds = ask(http, ids, segments, policy)
                texts.add(text)
                assert receipt["tokens"]["aligned"] >= 0.9 * args.tokens, receipt
                if number >= 0:
                    times[name]["first token"].append(receipt["seconds"]["ttft"] * 1e3)
                    times[name]["two tokens"].append(seconds * 1e3)
                time.sleep(0.05)
            assert len(texts) == 1, "another answer"
        return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/bin")
    parser.add_argument("--before", required=True)
    parser.add_argument("--kv-transport", default="shm")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--work", default="same:sparsex,mixed:sparsex,apart:sparsex,apart:splice,apart:samkv")
    args = parser.parse_args()
    for work in args.work.split(","):
        kind, policy = work.split(":")
        rng = random.Random(5)
        starts = [measure(args, kind, policy, rng) for _ in range(args.starts)]
        for what in ("first token", "two tokens"):
            before, after = ([statistics.median(start[name][what]) for start in starts] for name in ("before", "after"))
            pairs = [b - a for start in starts for b, a in zip(start["before"][what], start["after"][what])]
            print(f"{work} {what}: before {statistics.median(before):.1f} ms ({spread(before)}), after "
                  f"{statistics.median(after):.1f} ms ({spread(after)}); pairs: {statistics.median(pairs):+.1f} ms, after "
                  f"faster in {sum(p > 0 for p in pairs)} of {len(pairs)}", flush=True)


if __name__ == "__main__":
    main()
