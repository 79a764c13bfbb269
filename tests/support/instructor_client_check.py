#!/usr/bin/env python3
"""Checks a running endpoint with instructor: answers as objects, by tools, by a schema and as JSON.

usage: instructor_client_check.py http://HOST:PORT        (a model with a place for tools: client_server.py)

Needs `pip install instructor`. Exits 0 when every check holds.
"""
import sys
from typing import Literal

import instructor
import openai
from instructor.core import exceptions as errors
from pydantic import BaseModel, ConfigDict, Field


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a model may go on with members of its own


class Size(Closed):
    meters: int = Field(ge=1, le=40)


class Animal(Closed):
    """What an animal is."""

    kind: Literal["fish", "mammal"]
    size: Size
    names: list[Literal["fish", "whale"]] = Field(max_length=3)
    note: str | None = Field(default=None, max_length=12)


def main():
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    arguments = {"model": model, "messages": [{"role": "user", "content": "What is a whale?"}], "max_tokens": 400, "temperature": 1,
                 "seed": 5, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        animal = instructor.from_openai(client, mode=mode).chat.completions.create(response_model=Animal, **arguments)
        assert isinstance(animal, Animal) and 1 <= animal.size.meters <= 40, (mode, animal)
    partial = list(instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
        response_model=Animal, **arguments))
    assert partial and partial[-1].kind in ("fish", "mammal"), partial[-1:]
    # Any JSON object comes in this mode; that it is an animal is the model's to know.
    try:
        instructor.from_openai(client, mode=instructor.Mode.JSON).chat.completions.create(response_model=Animal, **arguments)
    except (errors.InstructorRetryException, errors.IncompleteOutputException) as raised:
        assert "validation error" in str(raised) or "incomplete" in str(raised), raised
    print("instructor ok")


if __name__ == "__main__":
    main()
