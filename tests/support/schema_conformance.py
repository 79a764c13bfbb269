#!/usr/bin/env python3
"""Whether answers keep to the JSON schemas that xgrammar's own tests carry: every answer that finishes must validate.

usage: schema_conformance.py SPLICE [--archive .cache/xgrammar/xgrammar-0.2.8.tar.gz] [--schemas 300] [--samples 3]

Starts `SPLICE serve` with splice-tiny and asks for each schema at temperature 1. Needs the Python package jsonschema. Prints the
counts, and every answer that is invalid, whose number decides the exit status. A refused schema must say why.
"""
import argparse
import ast
import collections
import concurrent.futures
import json
import sys
import tarfile
import urllib.error
import urllib.request

import jsonschema

import client_server

WORDS = {"type", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "required", "pattern", "minimum",
         "maximum", "prefixItems", "additionalProperties", "minLength", "maxLength", "format", "minItems", "maxItems"}
TYPES = {None, "object", "array", "string", "integer", "number", "boolean", "null"}


def as_schema(node):
    """The schema that a part of a Python program is, as a dictionary or as its text; None: it is none."""
    value = None
    try:
        if isinstance(node, ast.Dict):
            value = ast.literal_eval(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lstrip().startswith("{"):
            value = json.loads(node.value)
        kinds = value.get("type") if isinstance(value, dict) else 0
        if not isinstance(value, dict) or not set(value) & WORDS or not (isinstance(kinds, list) or kinds in TYPES):
            return None
        jsonschema.Draft202012Validator.check_schema(value)
        json.dumps(value)
        return value
    except (TypeError, ValueError, SyntaxError, jsonschema.SchemaError):
        return None


def schemas_in(archive):
    """The outermost schemas of the Python tests, each once, in the order of the archive."""
    found = {}

    def walk(node):
        schema = as_schema(node)
        if schema is not None:
            found.setdefault(json.dumps(schema), schema)
            return
        for inner in ast.iter_child_nodes(node):
            walk(inner)

    with tarfile.open(archive) as tar:
        names = sorted(name for name in tar.getnames() if "/tests/python/" in name and name.endswith(".py"))
        names.sort(key=lambda name: "json_schema" not in name)
        for name in names:
            walk(ast.parse(tar.extractfile(name).read()))
    return list(found.values())


def ask(address, schema, seed):
    """(kind, text): "valid", "invalid", "length", or "refused" with the reason."""
    body = {"messages": [{"role": "user", "content": "Answer."}], "max_tokens": 300, "temperature": 1, "seed": seed,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": False, "schema": schema}}}
    call = urllib.request.Request(address + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        choice = json.load(urllib.request.urlopen(call, timeout=120))["choices"][0]
    except urllib.error.HTTPError as error:
        return ("refused" if error.code == 400 else f"status {error.code}"), json.load(error)["error"]["message"]
    if choice["finish_reason"] != "stop":
        return choice["finish_reason"], ""
    try:
        answer = json.loads(choice["message"]["content"])
        jsonschema.Draft202012Validator(schema).validate(answer)
    except (ValueError, jsonschema.ValidationError) as error:
        return "invalid", f"{choice['message']['content']}\n  {str(error).splitlines()[0]}"
    return "valid", ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("splice")
    parser.add_argument("--archive", default=".cache/xgrammar/xgrammar-0.2.8.tar.gz")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--samples", type=int, default=3)
    args = parser.parse_args()
    schemas = schemas_in(args.archive)
    counts, served, reasons = collections.Counter(), 0, collections.Counter()
    with client_server.server(args.splice) as address, concurrent.futures.ThreadPoolExecutor(4) as pool:
        # Refused ones do not count: the next ones come in their places.
        for schema in schemas:
            if served == args.schemas:
                break
            results = list(pool.map(lambda seed: ask(address, schema, seed), range(args.samples)))
            if results[0][0] == "refused":
                assert results[0][1], schema
                reasons[results[0][1].split(": ", 1)[-1][:90]] += 1
                continue
            served += 1
            for kind, text in results:
                counts[kind] += 1
                if kind not in ("valid", "length"):
                    print(f"{kind}: {json.dumps(schema)}\n  {text}", flush=True)
    print(f"{served} schemas served and {sum(reasons.values())} refused, of {len(schemas)}; {args.samples} answers each: {dict(counts)}")
    for reason, count in reasons.most_common(8):
        print(f"  refused {count}: {reason}")
    sys.exit(0 if set(counts) <= {"valid", "length"} and served else 1)


if __name__ == "__main__":
    main()
