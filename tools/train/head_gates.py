#!/usr/bin/env python3
"""Learns which KV heads of a small Llama model must see everything while it answers, and writes head_classes.json.

Every KV head has a gate between its full attention and that of its sinks and window (DuoAttention, section 2). The last
rows of a prompt and its answer run over the exact KV of the text before them; gradient descent on the gates weighs the
answer's cross entropy against the sum of all gates. Gates end near 0 or near 1: heads with one above 0.1 become
global, or as many as --global-heads says. Heads that were local in the old map stay so in prefill; all others see
everything there ("prefill" in docs/head-classes.md). Sets of other samples than those that answers are measured with:
make_eval.py with another seed.

    python3 tools/train/head_gates.py --model models/splice-tiny --data vt.jsonl.xz,coref.jsonl.xz --length 4096 \\
      --count 6 --window 256 --out head_classes.json

Needs jax, numpy and ml_dtypes. For models of this size only: weights and activations are 32-bit, on the CPU, one sample
at a time.
"""
import argparse
import json
import lzma
import pathlib
import struct

import bpe
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

ROWS = 96  # the last rows of a text, which see by their gates: the question's end and the answer
BLOCK = 384  # rows of the exact prefill that attend at a time
OPEN = 0.1  # heads with a larger gate are global
DENSE_LAYERS = 2  # first layers, whose heads are always global (HeadClassMap::kDenseDecodeLayers)


class Llama:
    """The weights of a model, and the two passes over them. Shapes: [rows, heads, head_dim]."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            raw = file.read_bytes()
            size = struct.unpack("<Q", raw[:8])[0]
            for name, spec in json.loads(raw[8:8 + size]).items():
                if name == "__metadata__":
                    continue
                begin, end = (8 + size + x for x in spec["data_offsets"])
                values = np.frombuffer(raw[begin:end], dtype=ml_dtypes.bfloat16)
                tensors[name] = jnp.asarray(values.reshape(spec["shape"]).astype(np.float32))
        self.weights = tensors
        self.layers, self.kv_heads = self.config["num_hidden_layers"], self.config["num_key_value_heads"]
        self.q_heads, self.dim = self.config["num_attention_heads"], self.config["head_dim"]

    def of(self, layer, name):
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def norm(self, x, weight):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def rope(self, x, positions):
        half = self.dim // 2
        angle = positions[:, None] / self.config["rope_theta"]**(jnp.arange(half) / half)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        low, high = x[..., :half], x[..., half:]
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def qkv(self, layer, x, positions):
        h = self.norm(x, self.of(layer, "input_layernorm"))
        q, k, v = ((h @ self.of(layer, f"self_attn.{p}_proj").T).reshape(len(x), -1, self.dim) for p in "qkv")
        return self.rope(q, positions), self.rope(k, positions), v

    def attend(self, q, keys, values, seen):
        """seen: [1, rows, columns]. Returns [rows, kv_heads, group, head_dim]."""
        group = self.q_heads // self.kv_heads
        q = q.reshape(len(q), self.kv_heads, group, self.dim).transpose(1, 2, 0, 3)
        scores = jnp.matmul(q, keys.transpose(1, 2, 0)[:, None]) / self.dim**0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        return jnp.matmul(weights, values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3)

    def finish(self, layer, x, attention):
        x = x + attention.reshape(len(x), -1) @ self.of(layer, "self_attn.o_proj").T
        h = self.norm(x, self.of(layer, "post_attention_layernorm"))
        gate = jax.nn.silu(h @ self.of(layer, "mlp.gate_proj").T)
        return x + (gate * (h @ self.of(layer, "mlp.up_proj").T)) @ self.of(layer, "mlp.down_proj").T

    def prefill(self, ids):
        """Exact keys and values of a padded text: [layers, columns, kv_heads, head_dim] each, 16-bit."""
        x, positions, kept = self.weights["model.embed_tokens.weight"][ids], jnp.arange(len(ids)), []
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, x, positions)
            kept.append((k.astype(jnp.float16), v.astype(jnp.float16)))
            blocks = []
            for begin in range(0, len(ids), BLOCK):
                seen = positions[None, :begin + BLOCK] <= positions[begin:begin + BLOCK, None]
                blocks.append(self.attend(q[begin:begin + BLOCK], k[:begin + BLOCK], v[:begin + BLOCK], seen[None]))
            x = self.finish(layer, x, jnp.concatenate(blocks))
        return jnp.stack([k for k, _ in kept]), jnp.stack([v for _, v in kept])

    def answer(self, gates, ids, keys, values, end, window, sinks):
        """Logits of the rows [end - ROWS, end), whose heads see by `gates`: 1 everything, 0 sinks and window."""
        positions, columns = end - ROWS + jnp.arange(ROWS), jnp.arange(keys.shape[1])
        seen = (columns[None] <= positions[:, None])[None]
        near = seen & ((columns < sinks)[None, None] | (columns[None] > positions[:, None] - window)[None])
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, x, positions)
            k = jax.lax.dynamic_update_slice_in_dim(keys[layer].astype(jnp.float32), k, end - ROWS, 0)
            v = jax.lax.dynamic_update_slice_in_dim(values[layer].astype(jnp.float32), v, end - ROWS, 0)
            gate = gates[layer][None, :, None, None]
            both = gate * self.attend(q, k, v, seen) + (1 - gate) * self.attend(q, k, v, near)
            x = self.finish(layer, x, both)
        return self.norm(x, self.weights["model.norm.weight"]) @ self.weights["model.embed_tokens.weight"].T


def judge(logits, ids, answer_tokens):
    """Mean cross entropy of the answer, and whether every token of it comes first."""
    row, target = jnp.arange(ROWS), jnp.concatenate([ids[1:], ids[:1]])
    asked = (row >= ROWS - 1 - answer_tokens) & (row < ROWS - 1)
    chance = jax.nn.log_softmax(logits, -1)[row, target]
    return -(chance * asked).sum() / answer_tokens, ((logits.argmax(-1) == target) | ~asked).all()


def texts(files, length, first, count, tokenizer):
    for file in files:
        with lzma.open(file, "rt") as lines:
            samples = [s for s in map(json.loads, lines) if s["length"] == length]
        for sample in samples[first:first + count]:
            answer = tokenizer.encode(sample["answer"] + "<|im_end|>")
            yield tokenizer.encode("".join(x["text"] for x in sample["segments"])) + answer, len(answer)


def load(model, flags, tokenizer):
    """The texts that the model answers rightly, with their KV."""
    size = (flags.length + 128 + BLOCK - 1) // BLOCK * BLOCK
    prefill, known, asked = jax.jit(model.prefill), [], 0
    judged = jax.jit(lambda ids, k, v, end, n: judge(
        model.answer(jnp.ones((model.layers, model.kv_heads)), ids, k, v, end, flags.window, flags.sinks), ids, n))
    for ids, answer_tokens in texts(flags.data.split(","), flags.length, flags.first, flags.count, tokenizer):
        keys, values = prefill(jnp.asarray(np.pad(np.array(ids, np.int32), (0, size - len(ids)))))
        text = (jnp.asarray(ids[-ROWS:]), np.asarray(keys), np.asarray(values), len(ids), answer_tokens)
        asked += 1
        if judged(*text)[1]:
            known.append(text)
    print(f"{len(known)} of {asked} texts are answered rightly", flush=True)
    return known


def learn(model, known, flags):
    """Adam over batches of four texts. Returns the gates' logits."""
    def loss(logits, ids, keys, values, end, answer_tokens):
        gates = jax.nn.sigmoid(logits).at[:DENSE_LAYERS].set(1)
        return judge(model.answer(gates, ids, keys, values, end, flags.window, flags.sinks), ids, answer_tokens)[0]

    step, rng = jax.jit(jax.value_and_grad(loss)), np.random.default_rng(flags.seed)
    logits = np.full((model.layers, model.kv_heads), 2.0)
    mean, square, steps = np.zeros_like(logits), np.zeros_like(logits), 0
    for epoch in range(flags.epochs):
        total, order = 0.0, rng.permutation(len(known))
        for batch in (order[i:i + 4] for i in range(0, len(order), 4)):
            gradient = np.zeros_like(logits)
            for i in batch:
                value, of_text = step(jnp.asarray(logits), *known[i])
                total += float(value)
                gradient += np.asarray(of_text) / len(batch)
            gate = 1 / (1 + np.exp(-logits))
            gradient += flags.price * gate * (1 - gate)
            steps += 1
            mean, square = 0.8 * mean + 0.2 * gradient, 0.95 * square + 0.05 * gradient**2
            logits -= 0.15 * mean / (1 - 0.8**steps) / (np.sqrt(square / (1 - 0.95**steps)) + 1e-8)
        gates = 1 / (1 + np.exp(-logits[DENSE_LAYERS:]))
        print(f"epoch {epoch}: cross entropy {total / len(known):.4f}, sum of gates {gates.sum():.1f}", flush=True)
    return logits


def write(logits, flags):
    old = json.loads((flags.model / "head_classes.json").read_text())
    ranked = np.where(np.arange(len(logits))[:, None] < DENSE_LAYERS, np.inf, logits)
    is_global = np.zeros(ranked.size, bool)
    count = flags.global_heads or (1 / (1 + np.exp(-ranked)) > OPEN).sum()
    is_global[np.argsort(-ranked.ravel(), kind="stable")[:count]] = True
    print(f"{count} of {ranked.size} heads are global", flush=True)
    is_global = is_global.reshape(ranked.shape)
    def table(of):
        return [[of(layer, head) for head in range(ranked.shape[1])] for layer in range(ranked.shape[0])]
    def number(value):
        return table(lambda l, h: 0 if is_global[l, h] else value)
    before = old.get("prefill", old["class"])
    new = {**old, "preset": "gates", "class": table(lambda l, h: "global" if is_global[l, h] else "local"),
           "window": number(flags.keep_window), "sinks": number(flags.sinks),
           "prefill": table(lambda l, h: "global" if is_global[l, h] else before[l][h])}
    new.pop("quality", None)
    flags.out.write_text(json.dumps(new))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder with the weights and head_classes.json")
    parser.add_argument("--data", required=True, help="sets of make_eval.py, separated by commas")
    parser.add_argument("--length", type=int, default=2048, help="nominal length of the samples")
    parser.add_argument("--first", type=int, default=0, help="first sample of each set")
    parser.add_argument("--count", type=int, default=5, help="samples of each set")
    parser.add_argument("--window", type=int, default=128, help="window while learning")
    parser.add_argument("--keep-window", type=int, default=256, help="window in the map")
    parser.add_argument("--sinks", type=int, default=64)
    parser.add_argument("--price", type=float, default=0.01, help="of a gate, in nats of an answer's token")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--global-heads", type=int, help="with those of the first two layers; unset: gates above 0.1")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    flags = parser.parse_args()
    model = Llama(flags.model)
    write(learn(model, load(model, flags, bpe.Tokenizer(str(flags.model / "tokenizer.json"))), flags), flags)


if __name__ == "__main__":
    main()
