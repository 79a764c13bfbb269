#!/usr/bin/env python3
"""Checks a running endpoint with litellm: three turns with its own message objects, streams, tools, Responses.

usage: litellm_client_check.py http://HOST:PORT        (a model with a place for tools: client_server.py)

Needs `pip install litellm`. Exits 0 when every check holds.
"""
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # asks nobody for prices
import litellm  # noqa: E402

TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Bern", "Zug"]}}, "required": ["city"],
                   "additionalProperties": False}}}]


def main():
    for provider in ("openai", "hosted_vllm"):
        common = {"model": f"{provider}/splice-tiny", "api_base": sys.argv[1] + "/v1", "api_key": "none", "max_tokens": 200,
                  "temperature": 1, "seed": 1, "num_retries": 0}
        common["model"] = provider + "/" + litellm.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none").models.list().data[0].id
        history = [{"role": "user", "content": "Do I need an umbrella?"}]
        for _ in range(3):
            answer = litellm.completion(messages=history, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **common)
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls" and len(message.tool_calls) == 1, answer
            assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Bern", "Zug"), message
            history += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "rain"}]
        common["max_tokens"] = 8
        last = litellm.completion(messages=history, tools=TOOLS, **common)
        assert last.usage.completion_tokens <= 8, last
        history.append(last.choices[0].message)
        history.append({"role": "user", "content": [{"type": "text", "text": "And now?"}]})
        chunks = list(litellm.completion(messages=history, tools=TOOLS, tool_choice="none", stream=True,
                                         stream_options={"include_usage": True}, **common))
        rebuilt = litellm.stream_chunk_builder(chunks, messages=history)
        whole = litellm.completion(messages=history, tools=TOOLS, tool_choice="none", **common)
        assert rebuilt.choices[0].message.content == whole.choices[0].message.content, (rebuilt, whole)
        assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens, (rebuilt, whole)
        response = litellm.responses(input="Tea?", model=common["model"], api_base=common["api_base"], api_key="none",
                                     max_output_tokens=8)
        assert response.output, response
    print("litellm ok")


if __name__ == "__main__":
    main()
