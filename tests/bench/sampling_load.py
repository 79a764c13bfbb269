#!/usr/bin/env python3
"""What sampling costs: requests of one kind at a time, all kinds in turns, against one server.

  sampling_load.py BIN SHAPE [--streams 1 8 32 128] [--tokens 256] [--rounds 3] [-- MORE ARGUMENTS OF SERVE]

Starts `BIN/splice serve --random-weights SHAPE --backend cuda`. Prints milliseconds a token, the median of the requests' times over
their tokens, then the median of the rounds, for greedy decoding, and for each kind the difference to it. The last line of each
number of streams: one request that samples and is penalized beside others that are greedy; the time is that of the others.
"""

import argparse
import concurrent.futures
import json
import statistics
import time
import urllib.request

from serving import serving

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
KINDS = {
    "greedy": {"temperature": 0},
    "temperature 0.7": {"temperature": 0.7},
    "and top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "and top_k 50": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    "and penalties": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, **PENALTIES},
    "greedy, logprobs 5": {"temperature": 0, "logprobs": 5},
}


def ask(http, model, tokens, kind, seed):
    """Seconds of one answer."""
    prompt = [(seed * 7919 + i * 104729) % 100000 for i in range(64)]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": seed, **kind}
    call = urllib.request.Request(f"http://{http}/v1/completions", json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})
    began = time.monotonic()
    with urllib.request.urlopen(call) as answer:
        usage = json.load(answer)["usage"]
    assert usage["completion_tokens"] == tokens, usage
    return time.monotonic() - began


def ms_a_token(http, model, tokens, kinds):
    """Of requests of these kinds at once: the times of all."""
    with concurrent.futures.ThreadPoolExecutor(len(kinds)) as pool:
        calls = [pool.submit(ask, http, model, tokens, kind, i) for i, kind in enumerate(kinds)]
        return [call.result() / tokens * 1e3 for call in calls]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin")
    parser.add_argument("shape")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="further arguments of splice serve, behind --")
    args = parser.parse_args()
    with serving(args.bin, "--random-weights", args.shape, "--backend", "cuda", "--max-sequences", "256", *args.serve) as (http, _):
        with urllib.request.urlopen(f"http://{http}/v1/models") as models:
            model = json.load(models)["data"][0]["id"]
        for streams in args.streams:
            ms_a_token(http, model, 16, [KINDS["greedy"]] * streams)
            times = {name: [] for name in KINDS}
            beside = []
            for _ in range(args.rounds):
                for name, kind in KINDS.items():
                    times[name].append(statistics.median(ms_a_token(http, model, args.tokens, [kind] * streams)))
                if streams > 1:
                    mixed = [KINDS["and penalties"]] + [KINDS["greedy"]] * (streams - 1)
                    beside.append(statistics.median(ms_a_token(http, model, args.tokens, mixed)[1:]))
            greedy = statistics.median(times["greedy"])
            print(f"{streams} streams: greedy {greedy:.3f} ms ({min(times['greedy']):.3f} to {max(times['greedy']):.3f})")
            for name in list(KINDS)[1:]:
                print(f"  {name}: {(statistics.median(times[name]) / greedy - 1) * 100:+.1f} %")
            if beside:
                print(f"  greedy beside one with penalties: {(statistics.median(beside) / greedy - 1) * 100:+.1f} %", flush=True)


if __name__ == "__main__":
    main()
