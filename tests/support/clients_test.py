#!/usr/bin/env python3
"""Runs the checks with clients of others: those of OpenAI and Anthropic against a router over fake workers, libraries on top
of them against `splice serve` with splice-tiny.

usage: clients_test.py FAKE_ROUTER SPLICE ENVIRONMENT

ENVIRONMENT is a virtual environment with the packages, or some of them, made by

    python3 -m venv build/client-venv && build/client-venv/bin/pip install openai anthropic langchain-openai instructor \\
      litellm llama-index-llms-openai-like openai-agents "lm_eval[api]" transformers

Without any the test says so and is skipped (exit status 77).
"""
import pathlib
import subprocess
import sys

import client_server

FAKE = {"openai": "openai", "anthropic": "anthropic"}  # check by package
REAL = {"langchain_openai": "langchain", "instructor": "instructor", "litellm": "litellm",
        "llama_index.llms.openai_like": "llama_index", "agents": "agents", "lm_eval": "lm_eval"}


def main():
    router, splice, environment = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    python = environment / "bin" / "python"

    def has(package):
        finds = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
        return python.exists() and subprocess.run([python, "-c", finds], capture_output=True, check=False).returncode == 0

    def run(check, *arguments):
        path = pathlib.Path(__file__).with_name(f"{check}_client_check.py")
        subprocess.run([python, path, *arguments], check=True, timeout=300)

    found = [package for package in (*FAKE, *REAL) if has(package)]
    if not found:
        print(f"skipped: {environment} is no virtual environment with one of {', '.join((*FAKE, *REAL))}")
        sys.exit(77)
    for package in FAKE:
        if package in found:
            run(FAKE[package], "--command", router)
    if set(found) & set(REAL):
        with client_server.server(splice) as address:
            for package in REAL:
                if package in found:
                    run(REAL[package], address)
    for package in (*FAKE, *REAL):
        if package not in found:
            print(f"skipped: {environment} has no package {package}")


if __name__ == "__main__":
    main()
