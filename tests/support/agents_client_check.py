#!/usr/bin/env python3
"""Checks a running endpoint with OpenAI's Agents SDK, over chats and over Responses: a run with a tool, an answer as an object.

usage: agents_client_check.py http://HOST:PORT        (a model with a place for tools: client_server.py)

Needs `pip install openai-agents`. Exits 0 when every check holds.
"""
import asyncio
import sys
from typing import Literal

import agents
import openai
from pydantic import BaseModel

asked = []


@agents.function_tool
def weather(city: Literal["Bern", "Zug"]) -> str:
    """The weather of a city."""
    asked.append(city)
    return "rain in " + city


class Verdict(BaseModel):
    fish: bool
    sure: Literal["yes", "no"]


async def check(model):
    settings = {"max_tokens": 200, "temperature": 1, "parallel_tool_calls": False}
    # The first answer is the call that is asked for; behind it the agent is free, and ends.
    agent = agents.Agent(name="forecaster", instructions="Be brief.", model=model, tools=[weather],
                         model_settings=agents.ModelSettings(tool_choice="required", **settings),
                         tool_use_behavior="run_llm_again")
    before = len(asked)
    result = await agents.Runner.run(agent, "Do I need an umbrella?", max_turns=4)
    assert len(asked) > before and isinstance(result.final_output, str), result
    # The history of a run is the input of the next one.
    again = await agents.Runner.run(agent, result.to_input_list() + [{"role": "user", "content": "And in Zug?"}], max_turns=4)
    assert again.final_output is not None, again
    judge = agents.Agent(name="judge", model=model, output_type=Verdict, model_settings=agents.ModelSettings(**settings))
    assert isinstance((await agents.Runner.run(judge, "Is a whale a fish?")).final_output, Verdict)
    events = 0
    streamed = agents.Runner.run_streamed(judge, "Is a whale a fish?")
    async for event in streamed.stream_events():
        events += event.type == "raw_response_event"
    assert events > 1 and isinstance(streamed.final_output, Verdict), streamed


def main():
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    name = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none").models.list().data[0].id
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        asyncio.run(check(kind(model=name, openai_client=client)))
    print("openai-agents ok")


if __name__ == "__main__":
    main()
