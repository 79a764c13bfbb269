"""First tokens of prompts whose KV a store has, over links of several rates.

  python3 tests/bench/fetch_or_compute.py --bin build/bin [--before OTHER_BIN] --link build/bench/splice_slow_link

A worker puts the prompts into a store. For each link, workers that have seen nothing answer each of them once: without
a store, with it as --before has it, and as --bin has it. Prints a line for each and a table. Links are MB/s:ms; "memory"
reads the store's memory directly, "disk" a store that was started again. With --documents N a prompt is N documents
in another order than before and a question, computed by the method --reuse; each document was sent alone before.
"""
import argparse
import contextlib
import random
import statistics
import subprocess
import tempfile
import time
import urllib.request

from worker_processes import Program, chat, cluster, complete


def cluster_with(bin_dir, store):
    flags = ["--kv-bytes", "1536MiB", *(["--store", store] if store else [])]
    return cluster(bin_dir, f"{bin_dir}/splice-prefill", flags, ["--kv-bytes", "256MiB"])


class Tokens:
    """A prompt of token ids."""

    def __init__(self, rng, args):
        self.ids = [33 + rng.randrange(4000) for _ in range(args.tokens)]

    def ask(self, http, method):
        return complete(http, self.ids, 1)

    def store(self, http):
        complete(http, self.ids, 1)


class Documents:
    """A prompt of documents, whose KV is known by themselves, and a question."""

    def __init__(self, rng, args):
        words = ["".join(rng.choice("abcdefghijklmnoprstuvw") for _ in range(rng.randrange(3, 8))) for _ in range(400)]
        length = args.tokens // args.documents // 3  # a word is about three tokens
        self.documents = [" ".join(rng.choice(words) for _ in range(length)) for _ in range(args.documents)]
        self.order = rng.sample(range(args.documents), args.documents)
        self.question = f"Which word comes behind {rng.choice(words)}?"

    def ask(self, http, method):
        parts = [{"type": "segment", "text": self.documents[i]} for i in self.order]
        return chat(http, [*parts, {"type": "text", "text": self.question}], 1, splice={"reuse": method})

    def store(self, http):
        for document in self.documents:
            chat(http, [{"type": "segment", "text": document}], 1, splice={"reuse": "sparsex"})


def chunks_in(store):
    text = urllib.request.urlopen(f"http://{store.ready['metrics']}/metrics").read().decode()
    return sum(float(l.rsplit(" ", 1)[1]) for l in text.splitlines() if l.startswith("splice_store_chunks_stored_total"))


def fill(store, http, prompts):
    """Each prompt until the store has had nothing new for a second: workers put chunks into it when they have nothing to
    do, and do not keep more than a share of their pages for that."""
    have = 0
    for prompt in prompts:
        prompt.store(http)
        since = time.monotonic()
        while time.monotonic() - since < 1:
            time.sleep(0.1)
            if (now := chunks_in(store)) != have:
                have, since = now, time.monotonic()
    if not have:
        raise RuntimeError("no chunk was stored")
    print(f"{have:.0f} chunks stored", flush=True)


def text_of(reply):
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def measure(clusters, prompts, method, answers):
    """Each prompt once through each cluster, in turn: all see the same machine. Exact prompts have answers of their own."""
    results = {name: ([], {}) for name in clusters}
    for http in clusters.values():
        for _ in range(2):
            complete(http, [7] * 600, 1)  # connections, memory
    order, rng = list(clusters.items()), random.Random(3)
    for number, prompt in enumerate(prompts):
        rng.shuffle(order)
        for name, http in order:
            reply, _ = prompt.ask(http, method)
            receipt = reply["splice"]
            if method == "exact":
                assert answers.setdefault(number, text_of(reply)) == text_of(reply), "another answer"
            ms, uses = results[name]
            ms.append(receipt["seconds"]["ttft"] * 1e3)
            use = receipt.get("store", {}).get("use", "waited" if receipt["tokens"]["stored"] else "none")
            uses[use] = uses.get(use, 0) + 1
            time.sleep(1.5)  # what an answer leaves to do, publishing above all
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/bin")
    parser.add_argument("--before")
    parser.add_argument("--link", default="build/bench/splice_slow_link")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--links", default="10:0.1,10:20,50:0.1,50:20,200:0.1,200:20,1000:0.1,memory,disk")
    parser.add_argument("--documents", type=int, default=0, help="0: a prompt is a prefix that the store has")
    parser.add_argument("--reuse", default="sparsex", help="with --documents: the prefill method")
    parser.add_argument("--dir", help="folder on the disk that the store uses")
    args = parser.parse_args()
    rng = random.Random(7)
    prompts = [(Documents if args.documents else Tokens)(rng, args) for _ in range(args.prompts)]
    method = args.reuse if args.documents else "exact"
    answers, rows = {}, []
    need = args.prompts * args.tokens * 12 * 2 * 4 * 64 * 2 * 2  # room for slots, and no eviction
    if args.documents:
        need *= 4  # more tokens than words times three; a document is stored as a prompt, as a segment and quantized
    for link in args.links.split(","):
        data = tempfile.TemporaryDirectory(dir=args.dir)
        start = [f"{args.bin}/splice-kvstore", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--memory-bytes",
                 f"{int(need) >> 20}MiB", "--kv-transport", "auto" if link in ("memory", "disk") else "none"]
        if link == "disk":
            start += ["--data-dir", data.name]
        store = Program(*start)
        relays = []
        try:
            with cluster_with(args.bin, store.ready["grpc"]) as (router, _, _):
                fill(store, router["http"], prompts)
            if link == "disk":
                store.process.terminate()
                store.process.wait()
                store = Program(*start)
            address = store.ready["grpc"]
            with contextlib.ExitStack() as stack:
                clusters = {}
                for name, bin_dir, use_store in [("exact", args.bin, False), ("before", args.before, True), ("after", args.bin, True)]:
                    if bin_dir is None:
                        continue
                    through = address
                    if use_store and link not in ("memory", "disk"):  # a link for each: none sees another's reads
                        relays.append(Program(args.link, address, *link.split(":"), stdin=subprocess.PIPE))
                        through = relays[-1].ready["address"]
                    router, _, _ = stack.enter_context(cluster_with(bin_dir, through if use_store else None))
                    clusters[name] = router["http"]
                results = measure(clusters, prompts, method, answers)
            for name, (ms, uses) in results.items():
                print(f"{link} {name}: p50 {statistics.median(ms):.0f} ms, all {[round(x) for x in ms]}, {uses}", flush=True)
            rows.append((link, results))
        finally:
            for relay in relays:
                relay.stop()
            store.stop()
            data.cleanup()
    print("| link | " + " | ".join(rows[0][1]) + " | after / exact, paired | what after did |\n| --- " + "| --- " * (len(rows[0][1]) + 2) + "|")
    for link, results in rows:
        p50 = {name: statistics.median(ms) for name, (ms, _) in results.items()}
        ratio = statistics.median(a / e for a, e in zip(results["after"][0], results["exact"][0]))
        did = ", ".join(f"{n} {use}" for use, n in results["after"][1].items())
        print(f"| {link} | " + " | ".join(f"{x:.0f}" for x in p50.values()) + f" | {ratio:.3f} | {did} |")


if __name__ == "__main__":
    main()
