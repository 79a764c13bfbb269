#!/usr/bin/env python3
"""Converts a trace of the Azure public data set (AzureLLMInferenceTrace_*.csv: time, tokens in, tokens out) into the
JSONL of `splice bench --trace`. The set does not say which prompts begin with equal text: nothing is reused in it."""
import argparse
import datetime
import json
import lzma
import sys

HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def seconds(text):
    """Seconds since the epoch; the set has seven digits behind the point, datetime takes six."""
    whole, _, fraction = text.partition(".")
    at = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.timezone.utc)
    return at.timestamp() + float("0." + (fraction or "0"))


def convert(lines, name):
    """Yields the objects of the trace. ValueError names the line."""
    rows = (line.rstrip("\r\n").split(",") for line in lines)
    if next(rows, None) != HEADER:
        raise ValueError(f"{name}:1: must be {','.join(HEADER)}")
    first = None
    for number, row in enumerate(rows, 2):
        try:
            time, tokens_in, tokens_out = seconds(row[0]), int(row[1]), int(row[2])
        except (ValueError, IndexError):
            raise ValueError(f"{name}:{number}: must be a time and two numbers, got {','.join(row)!r}") from None
        first = time if first is None else first
        if tokens_in > 0 and tokens_out > 0:
            yield {"timestamp": round(1e3 * (time - first)), "input_length": tokens_in, "output_length": tokens_out}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", help="the file, plain or .xz")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout, help="default: standard output")
    args = parser.parse_args()
    opened = lzma.open(args.csv, "rt") if args.csv.endswith(".xz") else open(args.csv, encoding="utf-8")
    try:
        with opened as lines:
            for request in convert(lines, args.csv):
                args.out.write(json.dumps(request) + "\n")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
