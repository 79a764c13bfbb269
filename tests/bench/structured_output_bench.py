#!/usr/bin/env python3
"""What holding answers to a schema costs a decode step: streams of a server, with and without a schema, in turns.

  structured_output_bench.py BIN MODEL [--streams 1 8] [--tokens 120] [--rounds 5]

Starts `BIN/splice serve --model MODEL`. Prints, for each number of streams, the time between two tokens of a stream (median over
rounds) and the processor time of the server for each token. Answers have about as many tokens with a schema as without.
"""

import argparse
import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import time
import urllib.request


def stream(http, tokens, schema):
    """(tokens, seconds from the first to the last) of an answer."""
    body = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "temperature": 1, "max_tokens": tokens}
    if schema is None:
        body["ignore_eos"] = True
    else:
        body["guided_json"] = schema
    call = urllib.request.Request(f"http://{http}/v1/chat/completions", json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})
    times = []
    with urllib.request.urlopen(call) as answer:
        for line in answer:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                times.append(time.monotonic())
    return len(times), times[-1] - times[0]


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
    args = parser.parse_args()
    schema = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
                                         "required": ["name", "size"], "additionalProperties": False}, "minItems": 100}
    server = subprocess.Popen([os.path.join(args.bin, "splice"), "serve", "--model", args.model, "--http", "127.0.0.1:0", "--grpc",
                               "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in server.stdout:
            if line.startswith("ready"):
                http = re.search(r"127\.0\.0\.1:\d+", line).group()
                break
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
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
