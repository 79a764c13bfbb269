#!/usr/bin/env python3
"""Right answers over documents that are on the disk of a chunk store, through `splice serve`, by method.

The reusable segments of an evaluation set's samples become the documents of one knowledge base. For each method the
server starts anew, so that documents are on disk and nowhere else, and every sample is asked over its own documents.
Methods that leave exact KV in the store (exact) come last. Prints a table and the means of the receipts.

  tests/bench/stored_answers.py --eval SETS --length 8192 --limit 8 --methods samkv=0.25,sparsex,exact
    [--splice build/bin/splice] [--model models/splice-tiny] [--backend cpu] [--data-dir DIR] [--together]
    [--serve '--kv-bytes 8GiB --store-disk-bytes 45GiB'] [--json FILE]

A method is NAME[=BUDGET_RATIO][:OPTION=JSON]…
"""

import argparse
import json
import lzma
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

CORE_TASKS = (
    "agents_majority,agents_who,coref,memory,niah_single,niah_multikey,niah_multiquery,niah_multivalue,qa_names,vt,"
    "vt_letters,vt_update"
)


class Server:
    """`splice serve` over one data folder, from its ready line to its end."""

    def __init__(self, args):
        command = [args.splice, "serve", "--model", args.model, "--backend", args.backend, "--data-dir", args.data_dir]
        command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--log-level", "warning", *args.serve.split()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line.startswith("ready http="):
            sys.exit(f"splice serve ended before it was ready: {line}")
        self.url = "http://" + line.split()[1].removeprefix("http=")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def post(self, path, body):
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=1800) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            sys.exit(f"{path}: {error.read().decode()[:500]}")


def load_samples(args):
    samples = []
    for task in args.tasks.split(","):
        with lzma.open(pathlib.Path(args.eval) / f"{task}.jsonl.xz", "rt") as lines:
            of_length = (s for s in map(json.loads, lines) if s["length"] == args.length)
            samples += [s for _, s in zip(range(args.limit), of_length)]
    return samples


def options_of(method):
    """samkv=0.25:choose="means" → what a request says under "splice"."""
    name, *options = method.split(":")
    name, _, ratio = name.partition("=")
    splice = {"reuse": name}
    if ratio:
        splice["budget_ratio"] = float(ratio)
    for option in options:
        key, _, value = option.partition("=")
        splice[key] = json.loads(value)
    return splice


def ask(server, sample, ids, splice):
    parts = [
        {"type": "segment", "knowledge_base": "documents", "document": ids[s["text"]]}
        if s["type"] == "reuse"
        else {"type": "text", "text": s["text"]}
        for s in sample["segments"]
    ]
    answer = server.post(
        "/v1/completions",
        {
            "prompt": parts,
            "max_tokens": sample["max_new_tokens"],
            "temperature": 0,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "splice": splice,
        },
    )
    text = answer["choices"][0]["text"].split("<|im_end|>")[0]
    return {
        "id": sample["id"],
        "task": sample["task"],
        "right": text == sample["answer"],
        "text": text,
        "receipt": answer["splice"],
    }


def means(answers):
    sums = {}
    for answer in answers:
        for group in ("tokens", "bytes", "seconds"):
            for name, value in answer["receipt"][group].items():
                sums[f"{group}.{name}"] = sums.get(f"{group}.{name}", 0) + value / len(answers)
    return {k: round(v, 4) if k.startswith("seconds") else round(v) for k, v in sums.items() if v}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eval", required=True, help="folder of TASK.jsonl.xz")
    parser.add_argument("--tasks", default=CORE_TASKS)
    parser.add_argument("--length", type=int, default=4096, help="nominal tokens of the samples")
    parser.add_argument("--limit", type=int, default=5, help="samples of each task")
    parser.add_argument("--methods", default="samkv=0.25,sparsex,exact")
    parser.add_argument("--instruction", default="Answer from the documents.")
    parser.add_argument("--together", action="store_true", help="documents are computed behind each other")
    parser.add_argument("--splice", default="build/bin/splice")
    parser.add_argument("--model", default="models/splice-tiny")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--data-dir", help="of the chunk store; emptied first (default: a temporary folder)")
    parser.add_argument("--serve", default="", help="more flags of splice serve")
    parser.add_argument("--json", help="every answer with its receipt")
    args = parser.parse_args()
    temporary = args.data_dir is None
    if temporary:
        args.data_dir = tempfile.mkdtemp(prefix="splice-answers-")
    else:
        shutil.rmtree(args.data_dir, ignore_errors=True)

    samples = load_samples(args)
    ids = {}
    for sample in samples:
        for segment in sample["segments"]:
            if segment["type"] == "reuse":
                ids.setdefault(segment["text"], f"d{len(ids)}")
    started = time.monotonic()
    with Server(args) as server:
        version = server.post(
            "/admin/v1/knowledge_bases",
            {
                "name": "documents",
                "instruction": args.instruction,
                "together": args.together,
                "documents": [{"id": i, "text": text} for text, i in ids.items()],
            },
        )
    print(
        f"{len(samples)} samples of {args.length} tokens; {version['documents']} documents in {version['contexts']} "
        f"contexts, {version['bytes'] / 2**20:.0f} MiB, published in {time.monotonic() - started:.1f} s",
        flush=True,
    )
    everything = {}
    for method in args.methods.split(","):
        with Server(args) as server:
            answers = [ask(server, sample, ids, options_of(method)) for sample in samples]
        everything[method] = answers
        by_task = {}
        for answer in answers:
            by_task.setdefault(answer["task"], []).append(answer["right"])
        print(f"{method:24} {sum(a['right'] for a in answers):4} of {len(answers)} right: ", end="")
        print(" ".join(f"{task} {sum(right)}/{len(right)}" for task, right in by_task.items()))
        print("    mean receipt: " + json.dumps(means(answers)), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(everything))
    if temporary:
        shutil.rmtree(args.data_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
