"""A small Llama model in jax, for head_gates.py: its layers, and KV of a text as method splice has it.

32-bit, on the CPU, one text at a time. Shapes: [rows, heads, head_dim]; keys are kept without their rotation.
"""
import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

BLOCK = 384  # rows that attend at a time
ALONE = 1152  # longest segment
SHARE, FEWEST = 0.05, 576  # rows that a probe chooses (SparseXProbePolicy::kBehindProbe)
POOL, OVERFLOW, LINKS = 4, 16, 8  # score_pool, overflow_tokens, link_tokens of isolated copies (docs/methods/sparsex.md)


class Llama:
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            raw = file.read_bytes()
            size = struct.unpack("<Q", raw[:8])[0]
            for name, spec in json.loads(raw[8:8 + size]).items():
                if name == "__metadata__":
                    continue
                begin, end = (8 + size + x for x in spec["data_offsets"])
                values = np.frombuffer(raw[begin:end], dtype=ml_dtypes.bfloat16)
                self.weights[name] = jnp.asarray(values.reshape(spec["shape"]).astype(np.float32))
        self.layers, self.kv_heads = self.config["num_hidden_layers"], self.config["num_key_value_heads"]
        self.q_heads, self.dim = self.config["num_attention_heads"], self.config["head_dim"]
        self.alone, self.probe, self.recompute = jax.jit(self._alone), jax.jit(self._probe), jax.jit(self._recompute)

    def of(self, layer, name):
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def embed(self, ids):
        return self.weights["model.embed_tokens.weight"][ids]

    def logits(self, x):
        return self.norm(x, self.weights["model.norm.weight"]) @ self.weights["model.embed_tokens.weight"].T

    def norm(self, x, weight):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def rope(self, x, positions):
        half = self.dim // 2
        angle = positions[:, None] / self.config["rope_theta"]**(jnp.arange(half) / half)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        low, high = x[..., :half], x[..., half:]
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def qkv(self, layer, x, positions):
        """Queries are rotated, keys are not."""
        h = self.norm(x, self.of(layer, "input_layernorm"))
        q, k, v = ((h @ self.of(layer, f"self_attn.{p}_proj").T).reshape(len(x), -1, self.dim) for p in "qkv")
        return self.rope(q, positions), k, v

    def scores(self, q, keys):
        """[kv_heads, group, rows, columns] of rotated keys."""
        q = q.reshape(len(q), self.kv_heads, self.q_heads // self.kv_heads, self.dim).transpose(1, 2, 0, 3)
        return jnp.matmul(q, keys.transpose(1, 2, 0)[:, None]) / self.dim**0.5

    def attend(self, weights, values):
        """[rows, kv_heads, group, head_dim]."""
        return jnp.matmul(weights, values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3)

    def finish(self, layer, x, attention):
        x = x + attention.reshape(len(x), -1) @ self.of(layer, "self_attn.o_proj").T
        h = self.norm(x, self.of(layer, "post_attention_layernorm"))
        gate = jax.nn.silu(h @ self.of(layer, "mlp.gate_proj").T)
        return x + (gate * (h @ self.of(layer, "mlp.up_proj").T)) @ self.of(layer, "mlp.down_proj").T

    def _alone(self, ids):
        """Exact keys and values of a padded text: [layers, columns, kv_heads, head_dim] each, 16-bit."""
        x, positions, kept = self.embed(ids), jnp.arange(len(ids)), []
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, x, positions)
            rotated, blocks = self.rope(k, positions), []
            kept.append((k.astype(jnp.float16), v.astype(jnp.float16)))
            for begin in range(0, len(ids), BLOCK):
                end = begin + BLOCK
                seen = positions[:end] <= positions[begin:end, None]
                scores = jnp.where(seen, self.scores(q[begin:end], rotated[:end]), -1e30)
                blocks.append(self.attend(jax.nn.softmax(scores, -1), v[:end]))
            x = self.finish(layer, x, jnp.concatenate(blocks))
        return jnp.stack([k for k, _ in kept]), jnp.stack([v for _, v in kept])

    def _rows(self, layer, x, rows, keys, values, seen_from):
        """One layer over some rows of a text, whose K and V replace those of their places; those past the end are
        padding. Returns x, K, V and the attention, [rows, columns] summed over heads, of rows that are not padding."""
        columns = jnp.arange(keys.shape[1])
        q, k, v = self.qkv(layer, x, rows)
        k = keys[layer].astype(jnp.float32).at[rows].set(k, mode="drop")
        v = values[layer].astype(jnp.float32).at[rows].set(v, mode="drop")
        rotated, blocks, mass = self.rope(k, columns), [], jnp.zeros(len(columns))
        for begin in range(0, len(rows), BLOCK):
            at = rows[begin:begin + BLOCK]
            weights = jax.nn.softmax(
                jnp.where(columns <= at[:, None], self.scores(q[begin:begin + BLOCK], rotated), -1e30), -1)
            mass += (weights * (at < len(columns))[:, None]).sum((0, 1, 2)) if layer >= seen_from else 0
            blocks.append(self.attend(weights, v))
        return self.finish(layer, x, jnp.concatenate(blocks)), k, v, mass

    def _probe(self, ids, rows, keys, values):
        """The attention that each column gets from some rows in the upper half of the layers."""
        x, total = self.embed(ids[jnp.minimum(rows, len(ids) - 1)]), 0
        for layer in range(self.layers):
            x, _, _, mass = self._rows(layer, x, rows, keys, values, self.layers // 2)
            total += mass
        return total

    def _recompute(self, ids, rows, keys, values):
        """Keys and values after some rows were computed, which see everything."""
        x, kept = self.embed(ids[jnp.minimum(rows, len(ids) - 1)]), []
        for layer in range(self.layers):
            x, k, v, _ = self._rows(layer, x, rows, keys, values, self.layers)
            kept.append((k.astype(jnp.float16), v.astype(jnp.float16)))
        return jnp.stack([k for k, _ in kept]), jnp.stack([v for _, v in kept])

    def as_spliced(self, parts, size):
        """K and V of a prompt as the question finds them with method splice: copies of segments that were computed one
        by one, in which the rows are computed afresh that a probe of the new text chooses. `parts`: (ids, whether they
        are a segment); the last is the question. Its own K and V are of no use."""
        ids = padded(sum((part for part, _ in parts), []), size)
        shape = (self.layers, size, self.kv_heads, self.dim)
        keys, values = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
        begin, reused, around = 0, np.zeros(size, bool), np.zeros(size, bool)
        for part, is_segment in parts:
            end = begin + len(part)
            if is_segment:
                k, v = self.alone(jnp.asarray(padded(part, ALONE)))
                keys[:, begin:end], values[:, begin:end] = k[:, :len(part)], v[:, :len(part)]
                reused[begin:end] = True
                around[begin:begin + LINKS] = True
            else:
                around[max(0, begin - OVERFLOW):end + OVERFLOW] = True
            begin = end
        question = begin - len(parts[-1][0])
        fresh = np.flatnonzero(~reused[:begin])
        keys, values = jnp.asarray(keys), jnp.asarray(values)
        mass = np.asarray(self.probe(ids, padded(fresh, -(-len(fresh) // 128) * 128, size), keys, values))[reused]
        pooled = np.max([np.roll(np.pad(mass, POOL), by)[POOL:-POOL] for by in range(-POOL, POOL + 1)], 0)
        count = max(FEWEST, round(SHARE * len(mass)))
        chosen = np.flatnonzero(reused)[np.argsort(-pooled, kind="stable")[:count]]
        around[chosen] = True
        rows = np.flatnonzero(around[:question])
        return self.recompute(ids, padded(rows, -(-len(rows) // BLOCK) * BLOCK, size), keys, values)


def padded(ids, size, fill=0):
    return np.pad(np.asarray(ids, np.int32), (0, size - len(ids)), constant_values=fill)
