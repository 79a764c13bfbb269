#!/usr/bin/env python3
"""Writes chat.jsonl and snippets.jsonl with jinja2, set up as Hugging Face transformers sets it up.

    pip install jinja2; python3 make_chat_goldens.py
"""
import json
import pathlib

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent


class Raised(jinja2.exceptions.TemplateError):
    """raise_exception: the template refuses its input."""


class Generation(Extension):
    """{% generation %}: prints its body, as transformers' tracker does."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise Raised(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.filters["from_json"] = json.loads  # not in transformers; some templates expect it
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: __import__("datetime").datetime.now().strftime(f)
    return env


ENV = environment()
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "It's \"weather\" <b>&</b> é", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}, "days": {"type": "integer"}},
        "required": ["city"]}}},
    {"type": "function", "function": {"name": "noop", "parameters": {}, "return": {"type": "null"}, "ratio": 0.5, "none": None}},
]
CHATS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "Hi")],
    [("system", "  padded \n"), ("user", "\n two\nlines \t"), ("assistant", " ok "), ("user", "more")],
    [("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nanswer"), ("user", "q2")],
    [("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nanswer")],
    [("user", "日本語 🙂 {{ x }} {% y %}"), ("assistant", "a"), ("assistant", "b")],
    [("user", "q"), ("tool", "42"), ("tool", "{\"a\": 1}"), ("user", "<tool_response>x</tool_response>")],
    [("system", "only")],
    [("user", "a"), ("user", "b"), ("user", "c"), ("user", "d"), ("user", "e"), ("user", "f")],
    [],
]

def call(identifier, name, arguments):
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


# Conversations with tools, with all members as a client sends them; arguments as transformers wants them.
TOOL_CHATS = [
    [{"role": "user", "content": "Weather?"},
     {"role": "assistant", "content": None, "tool_calls": [call("abcdefgh1", "weather", {"city": "Zürich", "days": 2})]},
     {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "{\"rain\": true}"},
     {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "And tomorrow?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"},
     {"role": "assistant", "content": "Let me see.", "reasoning_content": "two calls <b>",
      "tool_calls": [call("abcdefgh1", "weather", {"city": "東京"})]},
     {"role": "tool", "tool_call_id": "abcdefgh1", "content": "warm"}],
    [{"role": "user", "content": "q", "name": "bob"},
     {"role": "assistant", "content": "", "tool_calls": [call("abcdefgh1", "noop", {})]},
     {"role": "tool", "tool_call_id": "abcdefgh1", "content": "a \"quoted\" result\nof two lines"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "because"},
     {"role": "user", "content": "q2"}],
]
EXTRAS = [{}, {"tools": TOOLS}, {"tools": TOOLS, "tools_in_user_message": False}, {"enable_thinking": False},
          {"builtin_tools": ["search", "code_interpreter", "math"]}]


def render(source, variables):
    try:
        return {"rendered": ENV.from_string(source).render(**variables)}
    except Raised as error:
        return {"error": str(error), "raised": True}
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error)}
    except (TypeError, ValueError, AttributeError, LookupError, ZeroDivisionError, OverflowError) as error:
        return {"error": str(error)}


def chats():
    for path in sorted((HERE / "templates").glob("*.jinja")):
        for messages in CHATS:
            for extra in EXTRAS:
                for prompt in (True, False) if not extra else (True,):
                    if path.name == "mistral_small.jinja":
                        extra = {**extra, "date_string": "2025-01-30"}
                    listed = [{"role": role, "content": content} for role, content in messages]
                    variables = {"messages": listed, "tools": None, "documents": None, "bos_token": "<s>",
                                 "eos_token": "</s>", "add_generation_prompt": prompt, **extra}
                    yield {"template": path.name, "messages": listed, "extra": extra,
                           "add_generation_prompt": prompt, **render(path.read_text(), variables)}
        for messages in TOOL_CHATS if "tool_calls" in path.read_text() else []:
            variables = {"messages": messages, "tools": TOOLS, "documents": None, "bos_token": "<s>", "eos_token": "</s>",
                         "add_generation_prompt": True, "date_string": "2025-01-30"}
            yield {"template": path.name, "messages": messages, "extra": {"tools": TOOLS, "date_string": "2025-01-30"},
                   "add_generation_prompt": True, **render(path.read_text(), variables)}


VARIABLES = {
    "s": "Hello World", "e": "", "n": 5, "neg": -7, "f": 2.5, "t": True, "none": None, "words": ["b", "a", "c"],
    "nested": [[1, 2], [3]], "d": {"b": 1, "a": [1, "x", None, 1.0]}, "uni": "héllo 日本 🙂", "quotes": "it's \"x\"",
    "users": [{"name": "ann", "age": 3, "tags": {"x": 1}}, {"name": "bob", "age": 4}, {"name": "cy", "age": 3}],
    "space": " \t x y \n", "csv": "a,b,,c", "floats": [1.0, 1e20, 1e-7, 123456789.123, 0.1, 1e16, 1e15],
    "control": "a\u0001\u001f\u007f\b\f\n\r\t\\\"é\u2028🙂", "method_key": {"items": 1, "x": 2},
}
SNIPPETS = (HERE / "snippets.txt").read_text().split("\n====\n")


def main():
    with open(HERE / "chat.jsonl", "w") as out:
        for line in chats():
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
    with open(HERE / "snippets.jsonl", "w") as out:
        out.write(json.dumps({"variables": VARIABLES}, ensure_ascii=False) + "\n")
        for source in SNIPPETS:
            out.write(json.dumps({"source": source, **render(source, VARIABLES)}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
