#!/usr/bin/env python3
"""Runs the checks with the official Python clients of OpenAI and Anthropic against a router over fake workers.

usage: clients_test.py FAKE_ROUTER ENVIRONMENT

ENVIRONMENT is a virtual environment with both packages, made by

    python3 -m venv build/client-venv && build/client-venv/bin/pip install openai anthropic

Without it the test says so and is skipped (exit status 77).
"""
import pathlib
import subprocess
import sys

CHECKS = ("openai", "anthropic")


def main():
    router, environment = sys.argv[1], pathlib.Path(sys.argv[2])
    python = environment / "bin" / "python"
    found = [name for name in CHECKS if python.exists() and subprocess.run([python, "-c", f"import {name}"],
                                                                          capture_output=True, check=False).returncode == 0]
    if not found:
        print(f"skipped: {environment} is no virtual environment with the packages {' and '.join(CHECKS)}")
        sys.exit(77)
    for name in found:
        check = pathlib.Path(__file__).with_name(f"{name}_client_check.py")
        subprocess.run([python, check, "--command", router], check=True, timeout=120)
    for name in set(CHECKS) - set(found):
        print(f"skipped: {environment} has no package {name}")


if __name__ == "__main__":
    main()
