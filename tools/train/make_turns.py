#!/usr/bin/env python3
"""Make multi-turn evaluation sets, held-out text and multi-turn traces (docs/evaluation.md). Standard library only.

  make_turns.py sets   --out DIR     growing.jsonl, shared.jsonl, quiz.jsonl for `splice eval`
  make_turns.py text   --out FILE    prose for `splice eval --perplexity`
  make_turns.py traces --out DIR     one trace for each set of LoopServe's Table 3, for `splice bench --trace`

The same arguments give the same bytes.
"""
import argparse
import json
import pathlib

import bpe
import lexicon
import prose
import samples
import traces
import turns

DEFAULT_MODEL = pathlib.Path(__file__).parents[2] / "models" / "splice-tiny"
WORDS = pathlib.Path(__file__).with_name("words.txt")  # keys, names and values: one token each in splice-tiny
FILLER_PARAGRAPHS = 3000  # some 400,000 tokens


def record(sample, length, index, tok):
    segments = [{"type": "answer" if kind == "ans" else kind, "text": text} for kind, text in sample.pieces]
    if segments[-1] == {"type": "new", "text": "\n"}:
        segments.pop()
    for s in segments:
        if s["type"] == "answer":
            del s["text"]
    answers = iter(sample.answers)
    texts = [s["text"] if "text" in s else next(answers) + "<|im_end|>" for s in segments]
    total = sum(tok.count(t) for t in texts)
    assert total <= length, (sample.task, total, length)
    return {"id": f"{sample.task}-{length}-{index:03d}", "task": sample.task, "length": length,
            "length_tokens": total - tok.count(texts[-1]), "answers": sample.answers,
            "max_new_tokens": max(tok.count(a) for a in sample.answers) + 8, "meta": sample.meta, "segments": segments}


def make_sets(args):
    tok = bpe.Tokenizer(args.model / "tokenizer.json")
    text = lexicon.load_text(args.text) if args.text else prose.text(args.seed, FILLER_PARAGRAPHS)
    world = samples.World("dev", WORDS.read_text(encoding="utf-8").split(), lexicon.Filler(text, tok.count), tok.count)
    args.out.mkdir(parents=True, exist_ok=True)
    for shape in args.shapes:
        path = args.out / f"{shape}.jsonl"
        num = 0
        with path.open("w", encoding="utf-8") as file:
            for length in args.lengths:
                for family in args.families:
                    for i in range(args.samples):
                        rng = turns.rng_of(args.seed, shape, family, length, i)
                        sample = turns.draw(rng, world, length, shape, family, i)
                        if sample is None:
                            raise SystemExit(f"{shape}_{family}: {length} tokens are too few for its questions")
                        file.write(json.dumps(record(sample, length, i, tok), ensure_ascii=False) + "\n")
                        num += 1
        print(f"{path}: {num} samples, {path.stat().st_size / 1e3:.0f} KB")


def make_text(args):
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(prose.text(args.seed, args.paragraphs), encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} KB")


def make_traces(args):
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.sets:
        path = args.out / f"{name}.jsonl"
        requests = traces.conversations(name, args.conversations, args.seed, args.max_tokens, args.rate, args.think)
        traces.write(path, requests)
        last = {r["conversation"]: r["input_length"] + r["output_length"] for r in requests}
        print(f"{path}: {len(requests)} requests, {sum(last.values()) / len(last):.0f} tokens a conversation")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    sets = commands.add_parser("sets", help="evaluation sets of several turns")
    sets.add_argument("--out", type=pathlib.Path, required=True, help="folder to write into")
    sets.add_argument("--model", type=pathlib.Path, default=DEFAULT_MODEL, help="folder with tokenizer.json")
    sets.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    sets.add_argument("--samples", type=int, default=12, help="of each family and length; a multiple of 3 has as many "
                      "questions at each position")
    sets.add_argument("--shapes", nargs="+", choices=turns.SHAPES, default=turns.SHAPES)
    sets.add_argument("--families", nargs="+", choices=turns.FAMILIES, default=turns.DEFAULT_FAMILIES)
    sets.add_argument("--text", help="a book for filling the contexts, a paragraph a line; default: generated prose")
    sets.add_argument("--seed", type=int, default=1)
    sets.set_defaults(run=make_sets)

    text = commands.add_parser("text", help="held-out prose")
    text.add_argument("--out", type=pathlib.Path, required=True, help="file to write")
    text.add_argument("--paragraphs", type=int, default=600, help="of some 130 tokens each")
    text.add_argument("--seed", type=int, default=2, help="differs from the one of the sets, whose filler is such prose")
    text.set_defaults(run=make_text)

    trace = commands.add_parser("traces", help="lengths of conversations over time")
    trace.add_argument("--out", type=pathlib.Path, required=True, help="folder to write into")
    trace.add_argument("--sets", nargs="+", choices=list(traces.SETS), default=list(traces.SETS))
    trace.add_argument("--conversations", type=int, default=100)
    trace.add_argument("--max-tokens", type=int, default=131072, help="of a conversation, answers included")
    trace.add_argument("--rate", type=float, default=1.0, help="conversations that begin in a second, Poisson")
    trace.add_argument("--think", type=float, default=5.0, help="mean seconds between a turn and the next")
    trace.add_argument("--seed", type=int, default=1)
    trace.set_defaults(run=make_traces)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
