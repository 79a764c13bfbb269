#!/usr/bin/env python3
"""Checks a running endpoint with langchain-openai: streams, bind_tools, tool messages, with_structured_output.

usage: langchain_client_check.py http://HOST:PORT        (a model with a place for tools: client_server.py)

Needs `pip install langchain-openai`. Exits 0 when every check holds.
"""
import json
import sys
from typing import Literal

import langchain_openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field


@tool
def weather(city: Literal["Bern", "Zug"], days: Literal[1, 2] = 1) -> str:
    """The weather of a city."""
    return f"rain in {city} for {days} days"


class Verdict(BaseModel):
    """Whether something is a fish."""

    fish: bool
    why: str = Field(max_length=20)


def main():
    common = {"base_url": sys.argv[1] + "/v1", "api_key": "none", "model": "", "temperature": 1, "seed": 3, "max_retries": 0}
    model = langchain_openai.ChatOpenAI(**common, max_tokens=300)
    short = langchain_openai.ChatOpenAI(**common, max_tokens=8, stream_usage=True)
    whole = short.invoke([SystemMessage("Be brief."), HumanMessage("Tea?")])
    assert whole.usage_metadata["output_tokens"] <= 8, whole
    chunks = list(short.stream([SystemMessage("Be brief."), HumanMessage("Tea?")]))
    assert "".join(chunk.content for chunk in chunks) == whole.content, chunks
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata], chunks
    assert len(short.batch(["Tea?", [("human", "Coffee?")]])) == 2

    history = [HumanMessage("Do I need an umbrella?")]
    answer = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(history)
    assert len(answer.tool_calls) == 1 and answer.tool_calls[0]["name"] == "weather", answer
    history += [answer, weather.invoke(answer.tool_calls[0])]
    assert isinstance(history[-1], ToolMessage), history
    assert isinstance(short.bind_tools([weather]).invoke(history), AIMessage)
    named = model.bind_tools([weather], tool_choice="weather", strict=True)
    merged = None
    for chunk in named.stream("Umbrella?"):
        merged = chunk if merged is None else merged + chunk
    assert merged.tool_calls and merged.tool_calls[0]["args"]["city"] in ("Bern", "Zug"), merged

    for method in ("json_schema", "function_calling"):
        verdict = model.with_structured_output(Verdict, method=method).invoke("Is a whale a fish?")
        assert isinstance(verdict, Verdict), verdict
    raw = model.with_structured_output(Verdict, method="json_mode", include_raw=True).invoke("As JSON: is a whale a fish?")
    assert isinstance(json.loads(raw["raw"].content), dict) or raw["parsing_error"], raw

    del common["seed"]
    responses = langchain_openai.ChatOpenAI(**common, max_tokens=300, use_responses_api=True)
    answer = responses.bind_tools([weather], tool_choice="any").invoke([HumanMessage("Umbrella?")])
    assert answer.tool_calls, answer
    assert isinstance(responses.with_structured_output(Verdict).invoke("Is a whale a fish?"), Verdict)
    print("langchain-openai ok")


if __name__ == "__main__":
    main()
