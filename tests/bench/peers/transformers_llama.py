"""The same work in Hugging Face transformers: prompt and decode times of a Llama shape with random bf16 weights.

  python3 transformers_llama.py --prefill 2048,8192,32768 --decode 1,8,32 --context 8192

Attention is PyTorch's scaled_dot_product_attention; the cache is transformers' own, static where it is compiled.
"""

import argparse
import json
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

LLAMA_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                         high_freq_factor=4.0, original_max_position_embeddings=8192))


def seconds(work, repeats):
    times = []
    for i in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i > 0:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", default="2048,8192,32768")
    parser.add_argument("--decode", default="1,8,32")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA_8B)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}",
          flush=True)
    out = {"prefill": [], "decode": []}
    for length in [int(x) for x in args.prefill.split(",") if x]:
        ids = torch.randint(0, config.vocab_size, (1, length), device="cuda")
        time_s = seconds(lambda: model(ids, use_cache=True, logits_to_keep=1), args.repeats)
        print(f"prompt of {length}: {1e3 * time_s:.1f} ms", flush=True)
        out["prefill"].append({"tokens": length, "seconds": time_s})
        torch.cuda.empty_cache()
    for batch in [int(x) for x in args.decode.split(",") if x]:
        cache = DynamicCache(config=config)
        shape = (batch, config.num_key_value_heads, args.context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda"), layer)
        token = torch.zeros((batch, 1), dtype=torch.long, device="cuda")

        def step():
            nonlocal token
            logits = model(token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True)

        step()
        time_s = seconds(lambda: [step() for _ in range(args.steps)], args.repeats) / args.steps
        print(f"decode, {batch} sequences at {args.context}: {1e3 * time_s:.3f} ms a step", flush=True)
        out["decode"].append({"batch": batch, "seconds": time_s})
        del cache
        torch.cuda.empty_cache()
    print(json.dumps(out))


main()
