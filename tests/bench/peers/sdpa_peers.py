"""Times PyTorch's scaled_dot_product_attention (cuDNN backend) on the shapes of attention_cuda_bench.

Median of event-timed calls with the L2 cache flushed before each, random data, contiguous K and V (no pages).
"""

import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

QO_HEADS, KV_HEADS, DIM = 32, 8, 128
flush = torch.ones(64 << 20, dtype=torch.int32, device="cuda")


def median_ms(call, reps):
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for begin, end in events:
        flush.max()  # read, not written: lines left dirty would be written back at the call's expense
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in events)


def tensors(batch, rows, kv_len, dim=DIM):
    q = torch.randn(batch, QO_HEADS, rows, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, KV_HEADS, kv_len, dim, device="cuda", dtype=torch.bfloat16)
    return q, k, torch.randn_like(k)


def prefill(name, batch, rows, kv_len, causal, reps, dim=DIM):
    q, k, v = tensors(batch, rows, kv_len, dim)
    ms = median_ms(lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True), reps)
    pairs = rows * (rows + 1) / 2 if causal else rows * kv_len
    print(f"{name:34} cudnn    {ms:9.4f} ms  {4 * dim * pairs * QO_HEADS * batch / ms * 1e-9:6.1f} TF/s", flush=True)


def decode(name, batch, kv_len, reps, dim=DIM):
    q, k, v = tensors(batch, 1, kv_len, dim)
    ms = median_ms(lambda: sdpa(q, k, v, enable_gqa=True), reps)
    print(f"{name:34} cudnn    {ms * 1e3:9.2f} us  {4 * dim * KV_HEADS * kv_len * batch / ms * 1e-9:6.2f} TB/s", flush=True)


def main():
    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    torch.manual_seed(1)
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        if what in ("all", "prefill"):
            for length, reps in ((2048, 50), (4096, 30), (8192, 30), (16384, 15), (32768, 12)):
                prefill(f"prefill causal {length // 1024}K", 1, length, length, True, reps)
            prefill("prefill last 2048 rows of 32K", 1, 2048, 32768, False, 20)
            prefill("prefill causal 8 x 2K", 8, 2048, 2048, True, 30)
            prefill("prefill causal 8K D64", 1, 8192, 8192, True, 20, 64)
        if what in ("all", "decode"):
            for batch, length, reps in ((1, 2048, 100), (1, 8192, 100), (1, 32768, 100), (1, 131072, 50), (8, 8192, 50),
                                        (8, 32768, 50), (32, 8192, 50), (32, 32768, 20)):
                decode(f"decode B{batch} {length // 1024}K", batch, length, reps)
            decode("decode B32 2K D64", 32, 2048, 50, 64)
            decode("decode B32 32K D64", 32, 32768, 20, 64)


if __name__ == "__main__":
    main()
