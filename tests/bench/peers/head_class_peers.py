"""Times PyTorch's attention with half of the KV heads local, on the shapes of attention_cuda_bench heads.

Causal, 32 query heads, 8 KV heads of 128 dims; a local head sees 64 sinks and a window of 256. Dense causal attention by
cuDNN and FlashAttention is the yardstick; then the same mask as a dense boolean tensor through
scaled_dot_product_attention, and as a block mask through FlexAttention. Median of event-timed calls with the L2 cache
flushed before each. A line that cannot run on this machine says why.
"""

import argparse

import torch
from sdpa_peers import DIM, KV_HEADS, QO_HEADS, median_ms, tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

WINDOW, SINKS = 256, 64
LOCAL_FROM = QO_HEADS // 2  # query heads from here on are of local KV heads


def visible(batch, head, row, key):
    near = (row - key < WINDOW) | (key < SINKS)
    return (key <= row) & (near | (head < LOCAL_FROM))


def dense_mask(length):
    row = torch.arange(length, device="cuda")[:, None]
    key = torch.arange(length, device="cuda")[None, :]
    mask = torch.empty(1, QO_HEADS, length, length, dtype=torch.bool, device="cuda")
    for head in range(QO_HEADS):
        mask[0, head] = visible(0, head, row, key)
    return mask


def report(name, length, call, reps):
    try:
        ms = median_ms(call, reps)
        print(f"heads prefill {length // 1024:3}K  {name:38} {ms:9.4f} ms", flush=True)
    except Exception as error:  # whatever this build of PyTorch does not have
        torch.cuda.synchronize()
        reason = (str(error).splitlines() or [type(error).__name__])[0][:150]
        print(f"heads prefill {length // 1024:3}K  {name:38} not measured: {reason}", flush=True)


def flex(q, k, v, length):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = create_block_mask(visible, 1, QO_HEADS, length, length, device="cuda", _compile=True)
    attend = torch.compile(flex_attention)
    return lambda: attend(q, k, v, block_mask=block_mask, enable_gqa=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--skip-flex", action="store_true", help="FlexAttention compiles for about a minute")
    args = parser.parse_args()
    torch.manual_seed(1)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {KV_HEADS} KV heads of {DIM}")
    with torch.no_grad():
        for length in args.lengths:
            q, k, v = tensors(1, length, length)
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    name = f"dense causal, {backend.name.split('_')[0].lower()}"
                    report(name, length, lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), args.reps)
            try:
                mask = dense_mask(length)
            except torch.OutOfMemoryError:
                print(f"heads prefill {length // 1024:3}K  dense mask: not enough memory")
                mask = None
            if mask is not None:
                # All heads written out: the memory-efficient kernel takes no groups of query heads.
                wide_k, wide_v = (x.repeat_interleave(QO_HEADS // KV_HEADS, 1) for x in (k, v))
                for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
                    with sdpa_kernel(backend):
                        name = f"half local, boolean mask, {backend.name.split('_')[0].lower()}"
                        report(name, length, lambda: sdpa(q, wide_k, wide_v, attn_mask=mask), max(3, args.reps // 3))
                del mask, wide_k, wide_v
                torch.cuda.empty_cache()
            if not args.skip_flex:
                try:
                    call = flex(q, k, v, length)
                except Exception as error:
                    print(f"heads prefill {length // 1024:3}K  FlexAttention: {type(error).__name__}")
                else:
                    report("half local, FlexAttention", length, call, args.reps)


if __name__ == "__main__":
    main()
