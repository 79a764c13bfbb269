#!/usr/bin/env python3
"""Checks a running endpoint with lm_eval's local-completions: log-likelihoods of texts, beside those of transformers.

usage: lm_eval_client_check.py http://HOST:PORT        (splice-tiny: client_server.py)

Needs `pip install lm_eval[api] transformers`. With ../shared/golden/splice-tiny (or below SPLICE_SHARED_DIR) the log-likelihoods
are compared with the logits there. Exits 0 when every check holds.
"""
import os
import pathlib
import sys

import numpy
from lm_eval.models.openai_completions import LocalCompletionsAPI
from safetensors.numpy import load_file

TOLERANCE = 0.03  # for a token; bf16


def log_likelihood(logits, ids):
    """Of ids[1:], each behind those in front of it."""
    rows = logits[: len(ids) - 1].astype(numpy.float64)
    rows -= rows.max(axis=1, keepdims=True)
    logprobs = rows - numpy.log(numpy.exp(rows).sum(axis=1, keepdims=True))
    return logprobs[numpy.arange(len(ids) - 1), ids[1:]], logprobs.argmax(axis=1) == ids[1:]


def main():
    model = LocalCompletionsAPI(base_url=sys.argv[1] + "/v1/completions", model="", tokenizer="models/splice-tiny", max_length=2048,
                                batch_size=2, max_retries=1)
    texts = [("Once upon", " a time"), ("The capital of France is", " Paris"), ("", "Tea.")]
    requests = [((context, text), model.tok_encode(context) or [model.eot_token_id], model.tok_encode(text)) for context, text in texts]
    answers = model._loglikelihood_tokens(requests, disable_tqdm=True)
    assert len(answers) == len(texts) and all(value < 0 for value, _ in answers), answers
    golden = pathlib.Path(os.environ.get("SPLICE_SHARED_DIR", "../shared")) / "golden/splice-tiny/golden.safetensors"
    if not golden.exists():
        print(f"lm_eval ok; not compared: there is no {golden}")
        return
    tensors, worst = load_file(golden), 0.0
    for name in sorted(tensors):
        prompt = name.removesuffix(".logits")
        if prompt == name or len(tensors[f"{prompt}.input_ids"]) < 2:
            continue
        ids = tensors[f"{prompt}.input_ids"].astype(int)
        of_tokens, greedy = log_likelihood(tensors[name], ids)
        for cut in (1, len(ids) // 2, len(ids) - 1):
            request = (("", ""), ids[:cut].tolist(), ids[cut:].tolist())
            value, is_greedy = model._loglikelihood_tokens([request], disable_tqdm=True)[0]
            expected, tokens = of_tokens[cut - 1:].sum(), len(ids) - cut
            worst = max(worst, abs(value - expected) / tokens)
            assert abs(value - expected) < TOLERANCE * tokens, (prompt, cut, value, expected)
            assert is_greedy == greedy[cut - 1:].all(), (prompt, cut)
    print(f"lm_eval ok; log-likelihoods of a token differ by {worst:.4f} at most")


if __name__ == "__main__":
    main()
