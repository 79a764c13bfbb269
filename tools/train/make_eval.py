#!/usr/bin/env python3
"""Make the evaluation sets: one .jsonl.xz per task, all lengths in it.

The dev and held-out sets differ in seed, in filler book, and in every key, name and variable.
"""
import argparse
import json
import lzma
import pathlib
import random

import bpe
import lexicon
import samples
import tasks

SEGMENTS = {1024: 4, 2048: 6, 4096: 8, 8192: 8, 16384: 16}
SETS = {
    "niah_single": lambda r, w, n, m, i: tasks.niah(r, w, n, m, "single"),
    "niah_multikey": lambda r, w, n, m, i: tasks.niah(r, w, n, m, "multikey"),
    "niah_multiquery": lambda r, w, n, m, i: tasks.niah(r, w, n, m, "multiquery"),
    "niah_multivalue": lambda r, w, n, m, i: tasks.niah(r, w, n, m, "multivalue"),
    "vt": lambda r, w, n, m, i: tasks.vt(r, w, n, m, "value", hops=1 + i % 4),
    "vt_list": lambda r, w, n, m, i: tasks.vt(r, w, n, m, "list"),
    "vt_update": lambda r, w, n, m, i: tasks.vt(r, w, n, m, "update"),
    "vt_letters": lambda r, w, n, m, i: tasks.vt(r, w, n, m, "value", hops=1 + i % 4, capital=True),
    "qa_1hop": lambda r, w, n, m, i: tasks.qa(r, w, n, m, hops=1),
    "qa_2hop": lambda r, w, n, m, i: tasks.qa(r, w, n, m, hops=2),
    "qa_names": lambda r, w, n, m, i: tasks.qa(r, w, n, m, hops=2, coded=False),
    "qa_split": lambda r, w, n, m, i: tasks.qa(r, w, n, m, hops=2, split=True),
    "coref": lambda r, w, n, m, i: tasks.coref(r, w, n, m),
    "memory": lambda r, w, n, m, i: tasks.memory(r, w, n, m),
    "agents_who": lambda r, w, n, m, i: tasks.agents(r, w, n, m, "who"),
    "agents_majority": lambda r, w, n, m, i: tasks.agents(r, w, n, m, "majority"),
    "cwe": lambda r, w, n, m, i: tasks.cwe(r, w, n, m),
    "fwe": lambda r, w, n, m, i: tasks.fwe(r, w, n, m),
    "fewshot": lambda r, w, n, m, i: tasks.fewshot(r, w, n, m),
    "copy": lambda r, w, n, m, i: tasks.copy(r, w, n, m),
    "multiturn": None,
}
ITEMS = {"niah_multiquery": ", ", "niah_multivalue": ", ", "vt_list": " ", "cwe": " ", "fwe": " "}


def record(s, name, length, i, split, tok):
    segments = [{"type": {"ans": "answer"}.get(k, k), "text": t} for k, t in s.pieces]
    if segments[-1] == {"type": "new", "text": "\n"}:
        segments.pop()
    ids, _ = s.encode(tok)
    whole = tok.encode("".join(t + ("<|im_end|>" if k == "ans" else "") for k, t in s.pieces))
    assert ids == whole, name
    prompt = sum(tok.count(x["text"]) + (x["type"] == "answer") for x in segments[:-1])
    out = {"id": f"{split}-{name}-{length}-{i:03d}", "task": name, "length": length, "length_tokens": prompt}
    if name != "multiturn":
        segments.pop()
        a = s.answers[0]
        out["answer"] = a
        out["items"] = a.split(ITEMS[name]) if name in ITEMS else [a]
        out["max_new_tokens"] = tok.count(a) + 8
        assert len([x for x in segments if x["type"] == "reuse"]) >= 4, (name, length)
    else:
        out["answers"] = s.answers
        out["max_new_tokens"] = max(tok.count(a) for a in s.answers) + 8
    assert prompt <= length, (name, prompt, length)
    out["meta"] = {k: v for k, v in s.meta.items() if k not in ("variant",)}
    out["segments"] = segments
    return out


def draw(name, rng, w, length, i, split, tok):
    while True:
        position = ("begin", "middle", "end")[i % 3] if name == "multiturn" else "end"
        mode = samples.Mode(train=False, segments=SEGMENTS[length], position=position)
        if name == "multiturn":
            s = tasks.multiturn(rng, w, length, mode)
        else:
            plan = SETS[name](rng, w, length, mode, i)
            s = plan and samples.assemble(plan, rng, w, length, mode)
        if s is not None:
            return record(s, name, length, i, split, tok)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tok", required=True)
    ap.add_argument("--book", required=True)
    ap.add_argument("--split", required=True, choices=("dev", "heldout"))
    ap.add_argument("--counts", default='{"1024":50,"2048":50,"4096":50,"8192":50,"16384":50}')
    ap.add_argument("--only", nargs="*", default=list(SETS))
    ap.add_argument("--seed", type=int, required=True)
    ap.add_argument("--out", required=True)
    args = ap.parse_args()
    tok = bpe.Tokenizer(f"{args.tok}/tokenizer.json")
    words = pathlib.Path(f"{args.tok}/words.txt").read_text().split()
    w = samples.World(args.split, words, lexicon.Filler(lexicon.load_text(args.book), tok.count), tok.count)
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    total = 0
    for name in args.only:
        rows = []
        for length, n in json.loads(args.counts).items():
            rng = random.Random(f"{args.seed}/{name}/{length}")
            if name == "cwe":
                n = (n + 1) // 2  # random words pack badly
            rows += [draw(name, rng, w, int(length), i, args.split, tok) for i in range(n)]
        raw = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()
        packed = lzma.compress(raw, preset=6, filters=None)
        (out / f"{name}.jsonl.xz").write_bytes(packed)
        total += len(packed)
        print(f"{name:18s} {len(rows):4d} samples {len(raw) / 1e6:6.1f} MB, packed {len(packed) / 1e6:5.2f} MB",
              flush=True)
    print(f"total packed {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
