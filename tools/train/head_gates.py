#!/usr/bin/env python3
"""Learns what each KV head of a small Llama model must see while it answers, and writes head_classes.json.

Every KV head has a gate that mixes its full attention and that of its sinks and of one or more windows (DuoAttention,
section 2). Question and answer run over the KV that method splice leaves of the text before them; gradient descent on
the gates weighs the answer's cross entropy against the tokens that are kept. Gates end near 0 or near 1: heads whose
full attention has more than 0.1 become global, or as many as --global-heads says; the others get the shortest window
that leaves no more than 0.1 to the longer ones. Heads that were local in the old map stay so in prefill; all others see
everything there ("prefill" in docs/head-classes.md). Sets of other samples than those that answers are measured with:
make_eval.py with another seed.

    python3 tools/train/head_gates.py --model models/splice-tiny --data vt.jsonl.xz,coref.jsonl.xz --length 4096,16384 \\
      --count 6 --windows 256,1024 --out head_classes.json
    python3 tools/train/head_gates.py --model models/splice-tiny --data vt.jsonl.xz --length 16384 --measure a.json,b.json

--measure learns nothing: right answers with maps, and the tokens they keep. --cache keeps KV, which takes longest, in
a folder. Needs jax, numpy and ml_dtypes.
"""
import argparse
import collections
import hashlib
import json
import lzma
import os
import pathlib

import bpe
import jax
import jax.numpy as jnp
import numpy as np
from small_llama import Llama, padded

ROWS = 72  # longest question and answer together
OPEN = 0.1  # heads with more than this of a gate need what it gives
SPARE = 128  # columns behind a text of its nominal length
PAGE = 64

Text = collections.namedtuple("Text", "name length ids begin asked answer keys values")


def answer(model, text, attend):
    """Logits of the rows of question and answer. attend(layer, scores, values, begin) is what their heads see."""
    positions, columns = text.begin + jnp.arange(ROWS), jnp.arange(text.keys.shape[1])
    x = model.embed(text.ids)
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x, positions)
        k = jax.lax.dynamic_update_slice_in_dim(text.keys[layer].astype(jnp.float32), k, text.begin, 0)
        v = jax.lax.dynamic_update_slice_in_dim(text.values[layer].astype(jnp.float32), v, text.begin, 0)
        scores = jnp.where(columns <= positions[:, None], model.scores(q, model.rope(k, columns)), -1e30)
        x = model.finish(layer, x, attend(layer, scores, v))
    return model.logits(x)


def by_gates(model, gates, text, flags):
    """gates: [layers, kv_heads, windows and everything], which add up to 1."""
    longest, windows, sinks, begin = max(flags.windows), flags.windows, flags.sinks, text.begin
    positions = begin + jnp.arange(ROWS)
    opened = (jnp.arange(ROWS) < text.asked)[:, None, None, None] & flags.whole_question
    columns = jnp.concatenate([jnp.arange(sinks), begin - longest + jnp.arange(longest + ROWS)])

    def near(x, axis):  # of all columns those of `columns`
        end = jax.lax.dynamic_slice_in_dim(x, begin - longest, longest + ROWS, axis)
        return jnp.concatenate([jax.lax.slice_in_dim(x, 0, sinks, axis=axis), end], axis)

    def attend(layer, scores, values):
        gate = gates[layer].T[:, None, :, None, None]
        full = model.attend(jax.nn.softmax(scores, -1), values)
        mixed = gate[-1] * full
        scores, values = near(scores, 3), near(values, 0)
        for i, window in enumerate(windows):
            seen = (columns < sinks) | (columns > positions[:, None] - window)
            mixed += gate[i] * model.attend(jax.nn.softmax(jnp.where(seen, scores, -1e30), -1), values)
        return jnp.where(opened, full, mixed)
    return attend


def by_map(model, window, sinks, text, flags):
    """window, sinks: [layers, kv_heads]; a global head has a window as long as the text."""
    positions, columns = text.begin + jnp.arange(ROWS), jnp.arange(text.keys.shape[1])
    opened = (jnp.arange(ROWS) < text.asked)[:, None] & flags.whole_question

    def attend(layer, scores, values):
        seen = (columns < sinks[layer][:, None, None]) | (columns > positions[:, None] - window[layer][:, None, None])
        seen |= opened
        return model.attend(jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1), values)
    return attend


def judge(logits, text):
    """Mean cross entropy of the answer, and whether every token of it comes first."""
    row, target = jnp.arange(ROWS), jnp.roll(text.ids, -1)
    asked = (row >= text.asked - 1) & (row < text.asked - 1 + text.answer)
    chance = jax.nn.log_softmax(logits, -1)[row, target]
    return -(chance * asked).sum() / text.answer, ((logits.argmax(-1) == target) | ~asked).all()


def samples(flags):
    """One of each set in turn, so that the first are a mixture."""
    for length in flags.length:
        sets = []
        for file in flags.data.split(","):
            with lzma.open(file, "rt") as lines:
                sets.append([s for s in map(json.loads, lines) if s["length"] == length][flags.first:][:flags.count])
        for i in range(flags.count):
            yield from (s[i] for s in sets if i < len(s))


def load(model, flags):
    """The texts with the KV that a question finds. Large: they are mapped from the cache, if there is one."""
    tokenizer, texts = bpe.Tokenizer(str(flags.model / "tokenizer.json")), []
    for sample in samples(flags):
        parts = [(tokenizer.encode(x["text"]), x["type"] == "reuse") for x in sample["segments"]]
        name = hashlib.sha256("".join(x["text"] for x in sample["segments"]).encode()).hexdigest()[:20]
        cached = flags.cache / f"{name}.npy" if flags.cache else None
        if cached is None or not cached.exists():
            kv = np.stack([np.asarray(x) for x in model.as_spliced(parts, sample["length"] + SPARE)])
            if cached is not None:
                flags.cache.mkdir(parents=True, exist_ok=True)
                part = cached.with_suffix(".part.npy")
                np.save(part, kv)
                os.replace(part, cached)
        if cached is not None:
            kv = np.load(cached, mmap_mode="r")
        asked, reply = parts[-1][0], tokenizer.encode(sample["answer"] + "<|im_end|>")
        begin = sum(len(part) for part, _ in parts[:-1])
        texts.append(Text(f"{sample['task']} {sample['length']}", sample["length"],
                          jnp.asarray(padded(asked + reply, ROWS)), begin, len(asked), len(reply), kv[0], kv[1]))
    return texts


def call(function, first, text):
    """A jitted function of arrays: names and lengths are none."""
    return function(first, *(jnp.asarray(x) for x in text[2:]))


def right_with(model, maps, texts, flags):
    """For each map, [layers, kv_heads] of windows and sinks, whether each text is answered rightly."""
    def run(classes, *fields):
        text = Text("", 0, *fields)
        return judge(answer(model, text, by_map(model, *classes, text, flags)), text)[1]

    run = jax.jit(run)
    return [[bool(call(run, tuple(jnp.asarray(x) for x in classes), text)) for classes in maps] for text in texts]


def everything(model):
    shape = (model.layers, model.kv_heads)
    return np.full(shape, 1 << 20), np.zeros(shape, int)


def kept(window, sinks, length):
    """Share of the tokens that a head keeps, in whole pages."""
    return np.minimum(1, (window + sinks + PAGE) / length)


def read(file, model, dense_layers):
    classes = json.loads(file.read_text())
    window, sinks = np.array(classes["window"]), np.array(classes["sinks"])
    is_global = np.array(classes["class"]) == "global"
    is_global[:classes.get("dense_layers", dense_layers)] = True
    return np.where(is_global, 1 << 20, window), np.where(is_global, 0, sinks)


def measure(model, flags):
    files = [pathlib.Path(x) for x in flags.measure.split(",")]
    maps = [everything(model)] + [read(file, model, flags.dense_layers) for file in files]
    texts, table = load(model, flags), collections.defaultdict(list)
    for text, right in zip(texts, right_with(model, maps, texts, flags)):
        table[text.name].append(right)
        table[f"all {text.length}"].append(right)
        print(f"{text.name}: {''.join('+' if x else '-' for x in right)}", flush=True)
    for name, rows in table.items():
        print(f"{name}: {' '.join(str(x) for x in np.sum(rows, 0))} of {len(rows)}")
    for name, classes in zip(["everything"] + [x.stem for x in files], maps):
        sizes = ", ".join(f"{1 / kept(*classes, n).mean():.2f} at {n}" for n in flags.length)
        print(f"{name}: {(classes[0] == 1 << 20).sum()} heads are global, capacity without restored heads {sizes}")


def learn(model, texts, flags):
    """Adam over batches of four texts. Returns the gates: [layers, kv_heads, windows and everything]."""
    def gates_of(logits):
        gates = jax.nn.softmax(logits, -1)
        return gates.at[:flags.dense_layers].set(jnp.eye(gates.shape[-1])[-1])

    def loss(logits, *fields):
        text = Text("", 0, *fields)
        seen = by_gates(model, gates_of(logits), text, flags)
        return judge(answer(model, text, seen), text)[0]

    step, rng = jax.jit(jax.value_and_grad(loss)), np.random.default_rng(flags.seed)
    # Windows are priced as in the shortest texts, where they are the largest part.
    cost = jnp.asarray([kept(x, flags.sinks, min(flags.length)) for x in flags.windows] + [1.0])
    price = jax.jit(jax.grad(lambda logits: flags.price * (gates_of(logits) * cost).sum()))
    logits = np.zeros((model.layers, model.kv_heads, len(cost)))
    logits[..., -1] = 2.0
    mean, square, steps = np.zeros_like(logits), np.zeros_like(logits), 0
    for epoch in range(flags.epochs):
        total, order = collections.defaultdict(list), rng.permutation(len(texts))
        for batch in (order[i:i + 4] for i in range(0, len(order), 4)):
            gradient = np.asarray(price(jnp.asarray(logits)), np.float64)
            for i in batch:
                value, of_text = call(step, jnp.asarray(logits), texts[i])
                total[texts[i].length].append(float(value))
                gradient = gradient + np.asarray(of_text) / len(batch)
            steps += 1
            mean, square = 0.8 * mean + 0.2 * gradient, 0.95 * square + 0.05 * gradient**2
            logits -= 0.15 * mean / (1 - 0.8**steps) / (np.sqrt(square / (1 - 0.95**steps)) + 1e-8)
        gates = np.asarray(gates_of(jnp.asarray(logits)))
        losses = ", ".join(f"{np.mean(x):.4f} at {n}" for n, x in sorted(total.items()))
        print(f"epoch {epoch}: cross entropy {losses}; sum of gates {gates.sum((0, 1)).round(1)}", flush=True)
        if flags.gates:
            np.save(flags.gates, gates)
    return gates


def write(gates, flags):
    old = json.loads((flags.model / "head_classes.json").read_text())
    full = gates[..., -1]
    is_global = np.zeros(full.size, bool)
    count = flags.global_heads or (full > OPEN).sum()
    is_global[np.argsort(-full.ravel(), kind="stable")[:count]] = True
    print(f"{count} of {full.size} heads are global", flush=True)
    is_global = is_global.reshape(full.shape)
    # The shortest window that leaves little to the longer ones.
    beyond = np.cumsum(gates[..., ::-1], -1)[..., ::-1][..., 1:]
    beyond = np.where(is_global[..., None], 0, beyond - full[..., None])
    window = np.array(flags.keep_windows)[np.argmax(beyond <= OPEN, -1)]
    def table(values):
        return np.where(is_global, np.array("global") if values is None else 0, "local" if values is None else values)
    new = {**old, "preset": "gates", "class": table(None).tolist(), "window": table(window).tolist(),
           "sinks": table(flags.sinks).tolist(),
           "prefill": np.where(is_global, "global", old.get("prefill", old["class"])).tolist()}
    if flags.dense_layers != 2:
        new["dense_layers"] = flags.dense_layers
    new.pop("quality", None)
    flags.out.write_text(json.dumps(new))


def numbers(text):
    return [int(x) for x in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder with the weights and head_classes.json")
    parser.add_argument("--data", required=True, help="sets of make_eval.py, separated by commas")
    parser.add_argument("--length", type=numbers, default=[2048], help="nominal lengths of the samples")
    parser.add_argument("--first", type=int, default=0, help="first sample of each set and length")
    parser.add_argument("--count", type=int, default=5, help="samples of each set and length")
    parser.add_argument("--windows", type=numbers, default=[256], help="windows that a head may have, ascending")
    parser.add_argument("--keep-windows", type=numbers, help="the same in the map; unset: as while learning")
    parser.add_argument("--sinks", type=int, default=64)
    parser.add_argument("--dense-layers", type=int, default=2, help="first layers, whose heads are always global")
    parser.add_argument("--whole-question", action="store_true", help="only the answer sees by class")
    parser.add_argument("--price", type=float, default=0.01, help="of a head that keeps all, in nats of an answer's token")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--global-heads", type=int, help="with those of dense layers; unset: gates above 0.1")
    parser.add_argument("--cache", type=pathlib.Path, help="folder for the texts' KV: 200 MB for 16,384 tokens")
    parser.add_argument("--gates", type=pathlib.Path, help="file for the gates, written after every epoch")
    parser.add_argument("--measure", help="maps, separated by commas: print how many texts are answered rightly")
    parser.add_argument("--out", type=pathlib.Path)
    flags = parser.parse_args()
    flags.keep_windows = flags.keep_windows or flags.windows
    model = Llama(flags.model)
    if flags.measure:
        measure(model, flags)
        return
    texts = load(model, flags)
    known = [text for text, right in zip(texts, right_with(model, [everything(model)], texts, flags)) if right[0]]
    print(f"{len(known)} of {len(texts)} texts are answered rightly", flush=True)
    write(learn(model, known, flags), flags)


if __name__ == "__main__":
    main()
