#!/usr/bin/env python3
"""Checks /v1/messages with the official Anthropic Python client, over fake workers that answer with their prompt.

usage: anthropic_client_check.py --command build/tests/fake_router

Needs `pip install anthropic`. Exits 0 when every check holds.
"""
import argparse
import subprocess

import anthropic

# The prompt, and so the answer, is what the messages say. The comment makes it a template of the formats.
TEMPLATE = ('{# tools tool_calls <tool_call> "arguments" <think> #}{% for m in messages %}{{ m.content }}'
            "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
TOOLS = [{"name": "weather", "description": "The weather of a city.",
          "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]


def user(text):
    return {"role": "user", "content": text}


def check(endpoint):
    client = anthropic.Anthropic(base_url=endpoint, api_key="none", max_retries=0)
    common = {"model": "echo", "max_tokens": 200}

    whole = client.messages.create(**common, system="Be brief.", messages=[user(" Tea?")])
    assert whole.type == "message" and whole.role == "assistant" and whole.stop_reason == "end_turn", whole
    assert [block.text for block in whole.content] == ["Be brief. Tea?"], whole
    counted = client.messages.count_tokens(model="echo", system="Be brief.", messages=[user(" Tea?")])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, (counted, whole.usage)

    asked = [user(f"<think>Hm.</think>Let me see. {CALL}")]
    whole = client.messages.create(**common, tools=TOOLS, messages=asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"], whole
    assert whole.content[0].thinking == "Hm." and whole.content[2].input == {"city": "Bern"}, whole
    assert whole.stop_reason == "tool_use" and whole._request_id, whole

    kinds = []
    with client.messages.stream(**common, tools=TOOLS, messages=asked) as stream:
        for event in stream:
            kinds.append(event.type)
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    assert {"text", "thinking", "input_json"} <= set(kinds), kinds
    assert [block.type for block in streamed.content] == [block.type for block in whole.content], streamed
    assert streamed.content[1].text == whole.content[1].text and streamed.content[2].input == {"city": "Bern"}
    assert streamed.stop_reason == "tool_use" and streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens

    # An answer goes back as it came, with the result of its call.
    history = [user("A"), {"role": "assistant", "content": whole.content},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "rain"}]}]
    answer = client.messages.create(**common, tools=TOOLS, messages=history)
    assert answer.content[0].text == 'ALet me see.[weather {"city": "Bern"}]rain', answer

    stopped = client.messages.create(**common, stop_sequences=[" three"], messages=[user("one two three four")])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == " three", stopped
    cut = client.messages.create(**{**common, "max_tokens": 1}, messages=[user("one two three")])
    assert cut.stop_reason == "max_tokens", cut

    for error, arguments in (
        (anthropic.BadRequestError, {"messages": [user([{"type": "image", "source": {"type": "url", "url": "u"}}])]}),
        (anthropic.BadRequestError, {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (anthropic.NotFoundError, {"model": "nope"}),
    ):
        try:
            client.messages.create(**{**common, "messages": [user("x")], **arguments})
        except error as raised:
            assert raised.body["type"] == "error" and raised.body["error"]["message"], raised.body
        else:
            raise AssertionError(f"{arguments} was accepted")
    print("anthropic", anthropic.__version__, "ok")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--command", required=True)
    arguments = parser.parse_args()
    server = subprocess.Popen([arguments.command, TEMPLATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        check("http://" + server.stdout.readline().strip())
    finally:
        server.stdin.close()
        server.wait(timeout=20)


if __name__ == "__main__":
    main()
