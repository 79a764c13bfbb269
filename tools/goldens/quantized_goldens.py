#!/usr/bin/env python3
"""Tiny quantized models of every family and layout, and Splice's logits of each beside those of transformers.

  python3 -m venv venv && venv/bin/pip install torch transformers safetensors
  venv/bin/python tools/goldens/quantized_goldens.py --splice build/bin/splice [--backend cpu] [--keep DIR]

For each family (llama, mistral, qwen2, qwen3, qwen3_moe) transformers makes a model with random weights. For each
layout this script quantizes its matrices, writes the folder as the public tools do (llm-compressor's
compressed-tensors, ModelOpt, the block format of DeepSeek and Qwen, GPTQ, AWQ), puts the dequantized values back into
the model, and lets transformers compute the logits in f32. `splice logits` computes those of the folder. Two numbers
are printed: the relative L2 distance of all logits in f32, where nothing is left but the order of sums (bound 1e-5),
and as programs run the folder, in bf16, beside that of the same model in bf16 without quantization (bound: 1.5 times
that). The latter are medians over positions, because in bf16 a row of which two experts weigh nearly the same may go to
the other one. Exit code 1 if a bound is broken.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HIDDEN, WIDTH, EXPERT_WIDTH, LAYERS, VOCAB = 256, 384, 128, 2, 512
FP8_MAX = 448.0


# ---- families ------------------------------------------------------------------------------------------------------
def family(name):
    common = dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=64, vocab_size=VOCAB, max_position_embeddings=512,
                  rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=EXPERT_WIDTH, norm_topk_prob=True,
               decoder_sparse_step=1, mlp_only_layers=[0])
    config = {
        "llama": lambda: transformers.LlamaConfig(**common),
        "mistral": lambda: transformers.MistralConfig(sliding_window=None, **common),
        "qwen2": lambda: transformers.Qwen2Config(**{k: v for k, v in common.items() if k != "head_dim"}),
        "qwen3": lambda: transformers.Qwen3Config(**common),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**common, **moe),
    }[name]()
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    with torch.no_grad():  # larger weights than an untrained model's, so that attention is not uniform
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.05 if parameter_name != "model.embed_tokens.weight" else 1.0)
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return model


def is_quantized(name):
    return name.endswith("_proj.weight")


# ---- layouts: each returns tensors that replace `name`, and the dequantized matrix ------------------------------------
def to_fp8(values):
    codes = values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, codes.float()


def fp8_scaled(weight, scales):  # scales broadcast over the matrix
    codes, values = to_fp8(weight / scales)
    return codes, values * scales


def fp8_tensor(name, w):
    scale = (w.abs().max() / FP8_MAX).float()
    codes, values = fp8_scaled(w, scale)
    return {name: codes, name + "_scale": scale.reshape(1)}, values


def fp8_modelopt(name, w):
    tensors, values = fp8_tensor(name, w)
    tensors[name + "_scale"] = tensors[name + "_scale"].reshape(())
    tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.02)
    return tensors, values


def fp8_channel(name, w):
    scale = (w.abs().amax(1, keepdim=True) / FP8_MAX).to(torch.bfloat16).float()
    codes, values = fp8_scaled(w, scale)
    return {name: codes, name + "_scale": scale.to(torch.bfloat16)}, values


def blocks(w, side=128):
    rows, columns = w.shape
    padded = torch.zeros(-(-rows // side) * side, -(-columns // side) * side)
    padded[:rows, :columns] = w.abs()
    scale = padded.reshape(padded.shape[0] // side, side, -1, side).amax((1, 3)) / FP8_MAX
    wide = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)[:rows, :columns]
    codes, values = fp8_scaled(w, wide)
    return codes, scale, values


def fp8_block(name, w):
    codes, scale, values = blocks(w)
    return {name: codes, name + "_scale_inv": scale}, values


def fp8_compressed_block(name, w):
    codes, scale, values = blocks(w)
    return {name: codes, name + "_scale": scale}, values


def int4_codes(w, group, asymmetric, dtype):
    """Codes 0 to 15, scales and zero points [rows, groups], and the values, with scales as `dtype` holds them."""
    rows, columns = w.shape
    parts = w.reshape(rows, columns // group, group)
    if asymmetric:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-6).to(dtype).float()
        zero = torch.round(-low / scale).clamp(0, 15)
    else:
        scale = (parts.abs().amax(2) / 7.5).clamp(min=1e-6).to(dtype).float()
        zero = torch.full_like(scale, 8)
    codes = torch.round(parts / scale[:, :, None] + zero[:, :, None]).clamp(0, 15)
    values = ((codes - zero[:, :, None]) * scale[:, :, None]).reshape(rows, columns)
    return codes.reshape(rows, columns).to(torch.int64), scale, zero.to(torch.int64), values


def pack(codes, axis, order=range(8)):
    """int32 words of eight codes along `axis`; bits 4 i of a word are code order[i] of its eight."""
    shape = list(codes.shape)
    shape[axis] //= 8
    shape.insert(axis + 1, 8)
    parts = codes.reshape(shape)
    words = sum(parts.select(axis + 1, at) << (4 * i) for i, at in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def packed(group, asymmetric):
    def layout(name, w):
        size = w.shape[1] if group == 0 else group
        codes, scale, zero, values = int4_codes(w, size, asymmetric, torch.bfloat16)
        tensors = {name + "_packed": pack(codes, 1), name + "_scale": scale.to(torch.bfloat16),
                   name + "_shape": torch.tensor(w.shape, dtype=torch.int64)}
        if asymmetric:
            tensors[name + "_zero_point"] = pack(zero, 0)
        return tensors, values
    return layout


def gptq(group, asymmetric, desc_act):
    def layout(name, w):
        columns = w.shape[1]
        order = torch.arange(columns)
        if desc_act:  # the column that was quantized i-th is order[i]; all tensors of a layer share it
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        codes, scale, zero, values = int4_codes(w[:, order], group, asymmetric, torch.float16)
        place = torch.empty_like(order)
        place[order] = torch.arange(columns)
        module = name[: -len(".weight")]
        tensors = {module + ".qweight": pack(codes[:, place].T.contiguous(), 0),
                   module + ".qzeros": pack((zero - 1 & 15).T.contiguous(), 1),  # checkpoint_format gptq: less one
                   module + ".scales": scale.T.to(torch.float16).contiguous(),
                   module + ".g_idx": (place // group).to(torch.int32)}
        return tensors, values[:, place]
    return layout


def awq(group):
    def layout(name, w):
        codes, scale, zero, values = int4_codes(w, group, True, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        module = name[: -len(".weight")]
        return {module + ".qweight": pack(codes.T.contiguous(), 1, order),
                module + ".qzeros": pack(zero.T.contiguous(), 1, order),
                module + ".scales": scale.T.to(torch.float16).contiguous()}, values
    return layout


def compressed(kind, strategy, bits=8, group=None, symmetric=True):
    weights = {"num_bits": bits, "type": "float" if bits == 8 else "int", "strategy": strategy, "symmetric": symmetric,
               "group_size": group, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True} if bits == 8 else None
    return {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}}


LAYOUTS = {
    "fp8 per tensor": (fp8_tensor, compressed("float-quantized", "tensor")),
    "fp8 per channel": (fp8_channel, compressed("float-quantized", "channel")),
    "fp8 blocks, compressed-tensors": (fp8_compressed_block, compressed("float-quantized", "block")),
    "fp8 ModelOpt": (fp8_modelopt, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8 blocks, DeepSeek and Qwen": (fp8_block, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                                                  "activation_scheme": "dynamic"}),
    "int4 packed, groups of 128": (packed(128, False), compressed("pack-quantized", "group", 4, 128)),
    "int4 packed, zero points, 32": (packed(32, True), compressed("pack-quantized", "group", 4, 32, False)),
    "int4 packed, per channel": (packed(0, False), compressed("pack-quantized", "channel", 4)),
    "gptq, groups of 128": (gptq(128, False, False), {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True,
                                                      "desc_act": False, "checkpoint_format": "gptq"}),
    "gptq, act-order, zero points, 32": (gptq(32, True, True), {"quant_method": "gptq", "bits": 4, "group_size": 32,
                                                                "sym": False, "desc_act": True,
                                                                "checkpoint_format": "gptq"}),
    "awq, groups of 128": (awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
                                      "version": "gemm"}),
}


# ---- folders and logits ----------------------------------------------------------------------------------------------
def checkpoint(model):
    """The tensors of the published layout: experts one by one, whatever transformers holds them as."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=True)
        tensors = {}
        for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
            tensors.update(load_file(path))
    return tensors


def load_back(model, tensors):
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file({k: v.contiguous() for k, v in tensors.items()}, os.path.join(folder, "model.safetensors"),
                  metadata={"format": "pt"})
        return type(model).from_pretrained(folder, torch_dtype=torch.float32).eval()


def write(folder, model, tensors, dtype, quantization):
    folder.mkdir(parents=True)
    config = json.loads(model.config.to_json_string())
    config.pop("dtype", None)
    config["architectures"] = [type(model).__name__]
    config["torch_dtype"] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    kept = {}
    for name, tensor in tensors.items():
        plain = tensor.dtype == torch.float32 and not name.endswith(("_scale", "_scale_inv", "input_scale"))
        kept[name] = (tensor if dtype == "float32" or not plain else tensor.to(torch.bfloat16)).contiguous()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def splice_logits(args, folder, ids, f32):
    ids_path, out = folder / "ids.json", folder / "logits.safetensors"
    ids_path.write_text(json.dumps(ids))
    command = [args.splice, "logits", "--model", str(folder), "--ids", str(ids_path), "--output", str(out), "--backend",
               "cpu" if f32 else args.backend]
    environment = dict(os.environ)
    if f32:
        command += ["--kv-dtype", "f32"]
        environment["SPLICE_CPU_ISA"] = "avx2"  # no products of bf16
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
    by_prompt = load_file(out)
    return torch.cat([by_prompt[key].float() for key in sorted(by_prompt)])


def distance(got, want):
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))


def median_distance(got, want):
    return float((torch.linalg.vector_norm(got - want, dim=1) / torch.linalg.vector_norm(want, dim=1)).median())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splice", required=True)
    parser.add_argument("--backend", default="cpu", help="of the second number; the first is always of the CPU")
    parser.add_argument("--families", default="llama,mistral,qwen2,qwen3,qwen3_moe")
    parser.add_argument("--keep", help="folder for the models, instead of a temporary one")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    root = pathlib.Path(args.keep or tempfile.mkdtemp())
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, VOCAB, size).tolist() for size in (1, 64, 200)]
    broken = 0
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; relative L2 distance")
    print(f"{'family':10} {'layout':34} {'f32':>9} {'as it runs':>11} {'bf16 weights':>13}")
    for name in args.families.split(","):
        model = family(name)
        plain = checkpoint(model)

        def want_of(tensors):
            twin = load_back(model, tensors)
            with torch.no_grad():
                return torch.cat([twin(torch.tensor([ids])).logits[0].float() for ids in prompts])

        folder = root / f"{name}-bf16"
        write(folder, model, plain, "bfloat16", None)
        unquantized = median_distance(splice_logits(args, folder, prompts, False), want_of(plain))
        for layout, (quantize, config) in LAYOUTS.items():
            if name == "qwen3_moe" and config.get("desc_act"):
                continue  # experts with act-order are refused
            tensors, values = {}, {}
            for tensor_name, tensor in plain.items():
                if not is_quantized(tensor_name):
                    tensors[tensor_name] = values[tensor_name] = tensor
                    continue
                made, values[tensor_name] = quantize(tensor_name, tensor)
                tensors.update(made)
            want = want_of(values)
            slug = f"{name}-{layout.replace(',', '').replace(' ', '-')}"
            results = []
            for dtype in ("float32", "bfloat16"):
                folder = root / f"{slug}-{dtype}"
                write(folder, model, tensors, dtype, config)
                measure = distance if dtype == "float32" else median_distance
                results.append(measure(splice_logits(args, folder, prompts, dtype == "float32"), want))
            bad = not results[0] < 1e-5 or not results[1] < 1.5 * unquantized
            broken += bad
            print(f"{name:10} {layout:34} {results[0]:9.1e} {results[1]:11.1e} {unquantized:13.1e}"
                  f"{'  BOUND BROKEN' if bad else ''}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
