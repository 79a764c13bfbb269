#!/usr/bin/env python3
"""Checks a running endpoint with the official OpenAI Python client.

usage: openai_client_check.py --endpoint http://HOST:PORT
       openai_client_check.py --command build/tests/fake_router      (prints HOST:PORT, ends with its stdin)

Needs `pip install openai`. Exits 0 when every check holds.
"""
import argparse
import subprocess

import openai


def check(endpoint):
    client = openai.OpenAI(base_url=endpoint + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something about tea."}]

    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0, seed=3)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    assert whole.choices[0].finish_reason in ("stop", "length")

    text, finish, usage = "", None, None
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0, seed=3,
                                            stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        if chunk.usage:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
    assert finish == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens

    logprobs = client.chat.completions.create(model=model, messages=messages, max_tokens=4, logprobs=True,
                                              top_logprobs=3).choices[0].logprobs
    assert len(logprobs.content) == 4 and all(len(t.top_logprobs) == 3 for t in logprobs.content)

    several = client.chat.completions.create(model=model, messages=messages, max_tokens=4, n=3)
    assert sorted(c.index for c in several.choices) == [0, 1, 2]

    # An answer goes back as the object that it came as, and as the dictionary of its members.
    for answer in (whole.choices[0].message, whole.choices[0].message.model_dump()):
        history = messages + [answer, {"role": "user", "content": "More.", "name": "ann"}]
        assert client.chat.completions.create(model=model, messages=history, max_tokens=2).choices

    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=messages, max_tokens=1, metadata={"a": "b"}, store=False, user="u", service_tier="auto",
        parallel_tool_calls=True, tool_choice="none", extra_body={"frobnicate": 1, "nothing": None})
    assert raw.headers["x-splice-ignored"] == "frobnicate", raw.headers

    chunks = list(client.chat.completions.create(
        model=model, messages=messages, max_tokens=4, stream=True,
        stream_options={"include_usage": True}, extra_body={
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}))
    assert all(chunk.usage.prompt_tokens == whole.usage.prompt_tokens for chunk in chunks)

    prompts = ["Once", "Twice upon", "A"]
    batch = client.completions.create(model=model, prompt=prompts, max_tokens=3, n=2, echo=True)
    assert [c.index for c in batch.choices] == list(range(6))
    assert all(c.text.startswith(prompts[c.index // 2]) for c in batch.choices)

    completion = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, echo=True)
    assert completion.choices[0].text.startswith("Once upon a time")
    pieces = [c.choices[0].text for c in client.completions.create(model=model, prompt="Once", max_tokens=8, stream=True)]
    assert len(pieces) > 1
    completion = client.completions.create(model=model, prompt="Once", max_tokens=5, logprobs=2)
    assert len(completion.choices[0].logprobs.tokens) == 5

    for error, arguments in (
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"extra_body": {"splice": {"frobnicate": 1}}}),
        (openai.BadRequestError, {"extra_body": {"guided_json": 5}}),
        (openai.BadRequestError, {"tool_choice": "required"}),
        (openai.NotFoundError, {"model": "nope"}),
    ):
        try:
            client.chat.completions.create(**{"model": model, "messages": messages, **arguments})
        except error as raised:
            assert raised.param, raised
        else:
            raise AssertionError(f"{arguments} was accepted")

    with client.chat.completions.create(model=model, messages=messages, stream=True) as left:
        next(iter(left))
    assert client.chat.completions.create(model=model, messages=messages, max_tokens=1).choices
    check_responses(client, model)
    print("openai", openai.__version__, "ok")


def check_responses(client, model):
    whole = client.responses.create(model=model, instructions="Be brief.", input="Say something about tea.", temperature=0,
                                    max_output_tokens=16, metadata={"a": "b"})
    assert whole.object == "response" and whole.status in ("completed", "incomplete") and whole.output_text, whole
    assert whole.metadata == {"a": "b"} and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert client.responses.retrieve(whole.id).output_text == whole.output_text

    with client.responses.stream(model=model, instructions="Be brief.", input="Say something about tea.", temperature=0,
                                 max_output_tokens=500) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        streamed = stream.get_final_response()
    assert streamed.status == "completed" and streamed.output_text == text, streamed
    assert text.startswith(whole.output_text), (text, whole.output_text)

    # The next turn says its own part only, or the items of the last one.
    turn = client.responses.create(model=model, input="More.", previous_response_id=whole.id, max_output_tokens=2)
    items = [{"role": "user", "content": "Say something about tea."}, *whole.output, {"role": "user", "content": "More."}]
    again = client.responses.create(model=model, input=items, max_output_tokens=2, store=False)
    assert turn.usage.input_tokens == again.usage.input_tokens and turn.previous_response_id == whole.id, (turn, again)

    client.responses.delete(whole.id)
    for gone in (whole.id, again.id):
        for call in (lambda: client.responses.retrieve(gone),
                     lambda: client.responses.create(model=model, input="x", previous_response_id=gone)):
            try:
                call()
            except openai.NotFoundError as raised:
                assert raised.code.endswith("response_not_found"), raised
            else:
                raise AssertionError(f"{gone} is still there")
    for arguments in ({"tools": [{"type": "web_search"}]}, {"background": True}, {"max_output_tokens": 0}):
        try:
            client.responses.create(**{"model": model, "input": "x", **arguments})
        except openai.BadRequestError as raised:
            assert raised.param, raised
        else:
            raise AssertionError(f"{arguments} was accepted")


def main():
    parser = argparse.ArgumentParser()
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--endpoint")
    group.add_argument("--command")
    arguments = parser.parse_args()
    if arguments.endpoint:
        return check(arguments.endpoint)
    server = subprocess.Popen([arguments.command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        check("http://" + server.stdout.readline().strip())
    finally:
        server.stdin.close()
        server.wait(timeout=20)


if __name__ == "__main__":
    main()
