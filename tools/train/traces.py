"""Conversations as lengths only, for load tests: lines that `splice bench --trace` reads.

Shapes after the eleven sets of LoopServe (arXiv 2507.13681), Table 3: turns and average tokens of a conversation. Of a
conversation's length the table only has that average; here it is log-normal around it (SIGMA), its turns split it at
random, no turn below a tenth. Output lengths are ours too: an answer, a summary, a label.
"""
import json
import math
import random

BLOCK_TOKENS = 512  # of a hash id
SIGMA = 0.35        # of the logarithm of a conversation's length
OUTPUT = {"qa": (8, 48), "summary": (200, 512), "fewshot": (2, 16)}  # tokens of an answer, from and to
SETS = {            # kind, turns, average tokens of a conversation
    "nqa": ("qa", 3, 30545.54), "qasper": ("qa", 3, 5434.41), "mfqa_en": ("qa", 3, 7279.64),
    "hotpotqa": ("qa", 3, 13847.19), "2wikimqa": ("qa", 3, 7471.16), "musique": ("qa", 3, 16587.56),
    "multinews": ("summary", 2, 2376.46), "govreport": ("summary", 2, 9324.43), "qmsum": ("summary", 2, 12780.29),
    "trec": ("fewshot", 2, 2293.99), "samsum": ("fewshot", 2, 3113.73),
}


def split(rng, total, parts):
    """`total` tokens over that many turns, each at least a tenth of its equal share."""
    weights = [0.1 + rng.expovariate(1.0) for _ in range(parts)]
    cuts = [round(total * w / sum(weights)) for w in weights[:-1]]
    return [max(1, c) for c in cuts] + [max(1, total - sum(cuts))]


def conversations(name, count, seed, max_tokens, rate_per_s, think_s):
    """Requests in the order in which they come. The prompt of a turn is everything so far, its hash ids those of the
    turn before and more: block b of a conversation has one id, whether it is full yet or not."""
    kind, turns, average = SETS[name]
    rng = random.Random(f"traces/{seed}/{name}")
    requests, start = [], 0.0
    for c in range(count):
        start += rng.expovariate(rate_per_s)
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        total = int(math.exp(rng.gauss(math.log(average) - SIGMA * SIGMA / 2, SIGMA)))
        total = max(turns, min(total, max_tokens))
        at, prompt = start, 0
        answers = [rng.randint(*OUTPUT[kind]) for _ in range(turns)]
        if total <= sum(answers):
            answers = [1] * turns
        for t, new in enumerate(split(rng, max(turns, total - sum(answers)), turns)):
            prompt += new + (answers[t - 1] if t else 0)
            blocks = -(-prompt // BLOCK_TOKENS)
            requests.append({"timestamp": round(at * 1000), "conversation": c, "turn": t + 1, "input_length": prompt,
                             "output_length": answers[t], "hash_ids": [c * 4096 + b for b in range(blocks)]})
            at += rng.expovariate(1 / think_s)
    requests.sort(key=lambda r: (r["timestamp"], r["conversation"], r["turn"]))
    return requests


def write(path, requests):
    with open(path, "w", encoding="utf-8") as file:
        for r in requests:
            file.write(json.dumps(r) + "\n")
