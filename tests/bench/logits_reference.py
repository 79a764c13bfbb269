#!/usr/bin/env python3
"""Compares the logits of `splice logits` with a float32 forward pass in numpy that reads the same folder by itself.

  reference.py MODEL_DIR IDS.json LOGITS.safetensors

MODEL_DIR is a Llama folder in f32, bf16, f16, FP8 with scales per tensor, channel or 128 x 128 block, or int4 as
compressed-tensors (pack-quantized), GPTQ or AWQ have it (widened to f32 here). Prints the relative L2 distance, the largest difference and how often both name the same next token. Needs numpy.
"""
import json
import pathlib
import sys

import numpy as np


def e4m3_table():
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -9), np.ldexp(8.0 + mantissa, exponent - 10))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


def read(path):
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int(raw[:8].view("<u8")[0])
    header = json.loads(bytes(raw[8 : 8 + header_bytes]))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = np.frombuffer(bytes(raw[8 + header_bytes + begin : 8 + header_bytes + end]), np.uint8)
        if entry["dtype"] == "F32":
            values = data.view("<f4")
        elif entry["dtype"] == "F16":
            values = data.view("<f2").astype(np.float32)
        elif entry["dtype"] == "BF16":
            values = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] in ("I32", "I64"):
            values = data.view("<i4" if entry["dtype"] == "I32" else "<i8")
        elif entry["dtype"] == "F8_E4M3":
            values = e4m3_table()[data]
        else:
            raise SystemExit(f"{path}: {name} is {entry['dtype']}")
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def nibbles(words, axis, order=range(8)):
    """Eight codes of each word along `axis`; place i of a word has code order[i] of its eight."""
    parts = [None] * 8
    for i, at in enumerate(order):
        parts[at] = words >> (4 * i) & 15
    stacked = np.stack(parts, axis + 1)
    shape = list(words.shape)
    shape[axis] *= 8
    return stacked.reshape(shape)


def int4_weight(tensors, quantization, name):
    """A matrix [out, in] in f32, or None: it is not in int4."""
    module = name[: -len(".weight")]
    if name + "_packed" in tensors:
        n, k = (int(v) for v in tensors[name + "_shape"])
        codes, scales = nibbles(tensors[name + "_packed"], 1)[:, :k], tensors[name + "_scale"]
        zeros = np.full_like(scales, 8)
        if name + "_zero_point" in tensors:
            zeros = nibbles(tensors[name + "_zero_point"], 0)[:n]
        groups = tensors.get(name + "_g_idx")
    elif module + ".qweight" in tensors:
        awq = quantization["quant_method"] == "awq"
        order = [0, 2, 4, 6, 1, 3, 5, 7] if awq else range(8)
        codes = nibbles(tensors[module + ".qweight"], 1 if awq else 0, order).T
        zeros = nibbles(tensors[module + ".qzeros"], 1, order).T
        if not awq and quantization.get("checkpoint_format", "gptq") == "gptq":
            zeros = zeros + 1 & 15
        scales, groups = tensors[module + ".scales"].T, tensors.get(module + ".g_idx")
    else:
        return None
    if groups is None or (groups == -1).any():
        group = quantization.get("group_size")
        for of in quantization.get("config_groups", {}).values():
            group = of["weights"].get("group_size")
        group = codes.shape[1] if group in (None, -1) else group
        groups = np.arange(codes.shape[1]) // group
    return ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32)


def weight(tensors, name):
    if name not in tensors:
        return int4_weight(tensors, tensors["quantization_config"], name)
    w = tensors[name]
    for suffix in ("_scale", "_scale_inv"):
        scale = tensors.get(name + suffix)
        if scale is None:
            continue
        if scale.size > 1 and scale.ndim == 2 and scale.shape[1] > 1:  # blocks
            scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: w.shape[0], : w.shape[1]]
        w = w * (scale if scale.size > 1 else scale.reshape(()))
    return w


def norm(x, gain, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * gain


def forward(config, t, ids):
    n, heads, kv_heads = len(ids), config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    eps = config["rms_norm_eps"]
    angles = np.arange(n, dtype=np.float32)[:, None] / np.float32(config["rope_theta"]) ** (
        np.arange(0, d, 2, dtype=np.float32) / d
    )
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

    def turn(v):
        low, high = v[..., : d // 2], v[..., d // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    x = t["model.embed_tokens.weight"][ids]
    hidden_future = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        linear = lambda name, v: v @ weight(t, p + name + ".weight").T
        h = norm(x, t[p + "input_layernorm.weight"], eps)
        q = turn(linear("self_attn.q_proj", h).reshape(n, heads, d))
        k = turn(linear("self_attn.k_proj", h).reshape(n, kv_heads, d))
        v = linear("self_attn.v_proj", h).reshape(n, kv_heads, d)
        k, v = (np.repeat(m, heads // kv_heads, 1) for m in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(d)) + hidden_future
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + linear("self_attn.o_proj", np.einsum("hqk,khd->qhd", scores, v).reshape(n, heads * d))
        h = norm(x, t[p + "post_attention_layernorm.weight"], eps)
        gate = linear("mlp.gate_proj", h)
        x = x + linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", h))
    x = norm(x, t["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return x @ weight(t, head).T


def main():
    folder = pathlib.Path(sys.argv[1])
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"] or config.get("rope_scaling") or config.get("attention_bias"):
        raise SystemExit("a Llama folder without scaled rope and biases is needed")
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(read(path))
    tensors["quantization_config"] = config.get("quantization_config")
    ours = read(sys.argv[3])
    difference = size = largest = same = positions = 0
    for i, ids in enumerate(json.loads(pathlib.Path(sys.argv[2]).read_text())):
        want, got = forward(config, tensors, ids), ours[f"logits_{i}"]
        difference += float(((got - want) ** 2).sum())
        size += float((want**2).sum())
        largest = max(largest, float(np.abs(got - want).max()))
        same += int((got.argmax(-1) == want.argmax(-1)).sum())
        positions += len(ids)
    print(f"relative L2 {np.sqrt(difference / size):.2e}, largest {largest:.3g}, "
          f"same next token {same} of {positions}")


if __name__ == "__main__":
    main()
