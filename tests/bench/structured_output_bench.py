#!/usr/bin/env python3
"""What holding answers to a schema costs a decode step: streams of a server, with and without a schema, in turns.

  structured_output_bench.py BIN MODEL [--streams 1 8] [--tokens 120] [--rounds 5] [--random-weights SHAPE]

Starts `BIN/splice serve --model MODEL`, with --random-weights a model of that shape with the tokenizer of MODEL. Prints, for each
number of streams, the time between two tokens of a stream (median over rounds) and the processor time of the server for each
token. Answers have about as many tokens with a schema as without. Then the gaps between tokens of as many streams with a schema
while requests with schemas that are new come beside them, and while none do.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import time
import urllib.request

from serving import serving


def stream(http, tokens, schema, gaps=None):
    """(tokens, seconds from the first to the last) of an answer. gaps: a list to which the seconds between texts are added."""
    body = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "temperature": 1, "max_tokens": tokens,
            "stream_options": {"include_usage": True}}
    if schema is None:
        body["ignore_eos"] = True
    else:
        body["guided_json"] = schema
    call = urllib.request.Request(f"http://{http}/v1/chat/completions", json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})
    times, count = [], 0
    with urllib.request.urlopen(call) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            if event["choices"]:
                times.append(time.monotonic())
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    if gaps is not None:
        gaps += [b - a for a, b in zip(times, times[1:])]
    return count, times[-1] - times[0]


def gaps_beside(http, streams, tokens, schema, newcomers):
    """Sorted seconds between texts of `streams` answers, while `newcomers` requests come whose schemas nobody had before."""
    gaps = []
    with concurrent.futures.ThreadPoolExecutor(streams + 1) as pool:
        running = [pool.submit(stream, http, tokens, schema, gaps) for _ in range(streams)]
        for i in range(newcomers):
            new = {"type": "object", "properties": {f"{key}_{time.time_ns()}": {"type": "string", "maxLength": 20 + i} for key in "abcdefgh"}}
            try:
                pool.submit(stream, http, 8, new).result()
            except RuntimeError as error:
                print(f"a new schema: {error}")
        for answer in running:
            answer.result()
    return sorted(gaps)


def processor_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin")
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--random-weights")
    args = parser.parse_args()
    schema = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
                                         "required": ["name", "size"], "additionalProperties": False}, "minItems": 100}
    model = ["--model", args.model]
    if args.random_weights:
        model = ["--random-weights", args.random_weights, "--tokenizer", args.model]
    with serving(args.bin, *model) as (http, server):
        for kind in (None, schema):
            stream(http, 8, kind)  # compiles, and warms up
        for streams in args.streams:
            per_token, processor = {False: [], True: []}, {False: [], True: []}
            for _ in range(args.rounds):
                for with_schema in (False, True):
                    before = processor_seconds(server.pid)
                    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
                        answers = list(pool.map(lambda _: stream(http, args.tokens, schema if with_schema else None), range(streams)))
                    spent = processor_seconds(server.pid) - before
                    per_token[with_schema] += [1e3 * seconds / max(1, count - 1) for count, seconds in answers]
                    processor[with_schema].append(1e3 * spent / (args.tokens * streams))
            for with_schema in (False, True):
                print(f"{streams} streams, {'with' if with_schema else 'without'} a schema: "
                      f"{statistics.median(per_token[with_schema]):.2f} ms between tokens, "
                      f"{statistics.median(processor[with_schema]):.2f} ms of processor time for each")
            for newcomers in (0, 8, 0, 8):
                gaps = gaps_beside(http, streams, args.tokens, schema, newcomers)
                print(f"{streams} streams with a schema, {newcomers} new schemas beside them: between texts p50 "
                      f"{1e3 * gaps[len(gaps) // 2]:.2f}, p99 {1e3 * gaps[len(gaps) * 99 // 100]:.2f}, most {1e3 * gaps[-1]:.2f} ms")


if __name__ == "__main__":
    main()
