#!/usr/bin/env python3
"""Checks a running endpoint with llama-index: chat, streams, completions, tools, structured answers.

usage: llama_index_client_check.py http://HOST:PORT        (a model with a place for tools: client_server.py)

Needs `pip install llama-index-llms-openai-like`. Exits 0 when every check holds.
"""
import sys
from typing import Literal

import openai
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def weather(city: Literal["Bern", "Zug"]) -> str:
    """The weather of a city."""
    return "rain in " + city


class Verdict(BaseModel):
    """Whether something is a fish."""

    fish: bool
    sure: Literal["yes", "no"]


def main():
    base = sys.argv[1] + "/v1"
    name = openai.OpenAI(base_url=base, api_key="none").models.list().data[0].id
    model = OpenAILike(model=name, api_base=base, api_key="none", is_chat_model=True, is_function_calling_model=True,
                       max_tokens=200, temperature=1, max_retries=0, context_window=4096,
                       additional_kwargs={"seed": 4})
    history = [ChatMessage(role=MessageRole.SYSTEM, content="Be brief."), ChatMessage(role=MessageRole.USER, content="Umbrella?")]
    whole = model.chat(history, max_tokens=8)
    streamed = list(model.stream_chat(history, max_tokens=8))[-1]
    assert streamed.message.content == whole.message.content, (streamed, whole)
    tool = FunctionTool.from_defaults(weather)
    answer = model.chat_with_tools([tool], chat_history=history, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and calls[0].tool_name == "weather" and calls[0].tool_kwargs["city"] in ("Bern", "Zug"), answer
    history += [answer.message]
    history += [ChatMessage(role=MessageRole.TOOL, content=str(tool(**call.tool_kwargs)),
                            additional_kwargs={"tool_call_id": call.tool_id}) for call in calls]
    assert model.chat_with_tools([tool], chat_history=history, max_tokens=8).message.role == MessageRole.ASSISTANT
    verdict = model.structured_predict(Verdict, PromptTemplate("Is a {animal} a fish?"), animal="whale")
    assert isinstance(verdict, Verdict), verdict
    assert isinstance(model.as_structured_llm(Verdict).complete("Is a whale a fish?").raw, Verdict)
    plain = OpenAILike(model=name, api_base=base, api_key="none", is_chat_model=False, max_tokens=8, max_retries=0)
    assert plain.complete("Once upon a time").text
    assert len(list(plain.stream_complete("Once upon a time"))) > 1
    print("llama-index ok")


if __name__ == "__main__":
    main()
