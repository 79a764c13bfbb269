#!/usr/bin/env python3
"""Checks that the programs do what the documentation says: options, metrics, request bodies, commands.

  docs_test.py ROOT BIN      checks README.md, SECURITY.md and docs/ against the programs in the folder BIN;
                             every line that it prints is a mistake
  docs_test.py --self-test   checks that the checks find what they should

Checked in every page (docs/results and docs/decisions tell of their day and are left out):

  - an option of splice, splice-router, splice-prefill, splice-decode or splice-kvstore, in a code block or in `backticks`, is
    known to the --help of that program and subcommand; one in backticks without its program, to one of them;
  - a name splice_… is somewhere in the sources;
  - JSON is JSON: blocks ```json and ```jsonl, and what curl and grpcurl send;
  - request bodies are served, by one `splice serve` with models/splice-tiny: what curl sends in any block, blocks
    ```json request /v1/chat/completions, and inline `{"splice": {…}}`, which is put into a small request;
  - blocks ```sh run and ```python run exit with 0.

A page is a session: its blocks run in their order, in a folder of their own that looks like the repository's. Where they
name 127.0.0.1:8000 and 127.0.0.1:8001, and where `splice ctl` and `splice kb` name nobody, they reach the server. ```sh
background starts a program, waits until it prints "ready", and ends it with the page; its ports, and with them the page's,
are replaced by free ones. ```sh run status=N expects another exit status. ```sh run with=FILE, with its output, is skipped
where the folder BIN has no such file, which is said. ```text output behind a block that ran has lines
that it must have printed: … stands for anything, numbers may be 10 % off, times and rates are not compared. Python blocks
find small modules `openai` and `anthropic` that speak HTTP, for there may be no others.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

HIDDEN = {"--fault"}  # for tests; --help leaves it out
PROGRAMS = ("splice", "splice-router", "splice-prefill", "splice-decode", "splice-kvstore")
SOURCES = {".h", ".cc", ".cu", ".txt", ".cmake", ".py", ".proto"}
LEFT_OUT = ("docs/results/", "docs/decisions/")
HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:8001"
ADDRESS = r"127\.0\.0\.1:\d{4,5}"
BLOCK_SECONDS = 30

WRAPPER = """#!/bin/sh
case "$*" in
  *--url*|*--help*) ;;
  ctl*|kb*) exec {real}/splice "$@" --url http://{http} ;;
esac
exec {real}/splice "$@"
"""

FAKE_CLIENTS = '''
import json, urllib.request
class Thing(dict):
    def __getattr__(self, name):
        if name == "model_extra":
            return self
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name)
def thing(value):
    if isinstance(value, dict):
        return Thing({k: thing(v) for k, v in value.items()})
    return [thing(v) for v in value] if isinstance(value, list) else value
class Posting:
    def __init__(self, url, headers):
        self.url, self.headers = url, {"Content-Type": "application/json", **headers}
    def create(self, **fields):
        request = urllib.request.Request(self.url, json.dumps(fields).encode(), self.headers)
        return thing(json.load(urllib.request.urlopen(request, timeout=30)))
class Anthropic:
    def __init__(self, base_url, api_key):
        self.messages = Posting(base_url + "/v1/messages", {"x-api-key": api_key})
class OpenAI:
    def __init__(self, base_url, api_key):
        self.url, self.key = base_url, api_key
        self.chat = self.completions = self
        self.responses = Posting(self.url + "/responses", {"Authorization": "Bearer " + api_key})
    def create(self, extra_body=None, stream=False, **fields):
        body = {**fields, **(extra_body or {}), **({"stream": True} if stream else {})}
        path = "/chat/completions" if "messages" in body else "/completions"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json", "Authorization": "Bearer " + self.key})
        answer = urllib.request.urlopen(request, timeout=30)
        if not stream:
            return thing(json.load(answer))
        lines = [line[6:] for line in answer.read().decode().split("\\n") if line.startswith("data: {")]
        return [thing(json.loads(line)) for line in lines]
'''


class Block:
    """A code block: its info string, first line, and text without the fence's indentation."""

    def __init__(self, info, line, text):
        self.language, *self.marks = info.split() or [""]
        self.line = line
        self.text = text


def read_page(text):
    """(code blocks, [(line number, what stands in backticks)])."""
    blocks, spans = [], []
    in_list = False
    fence = None
    indented = None
    before = ""
    for number, line in enumerate(text.split("\n"), 1):
        match = re.match(r"(\s*)(```+)(.*)$", line)
        if fence is None and match:
            fence = (match[1], match[2], match[3].strip(), number, [])
        elif fence is not None and match and match[2] == fence[1] and not match[3].strip():
            blocks.append(Block(fence[2], fence[3], "\n".join(fence[4]) + "\n"))
            fence = None
        elif fence is not None:
            fence[4].append(line.removeprefix(fence[0]))
        elif re.match(r" {4}", line) and (indented is not None or not before.strip() and not in_list):
            indented = indented or Block("", number, "")
            indented.text += line[4:] + "\n"
        else:
            if indented is not None and line.strip():
                blocks.append(indented)
                indented = None
            in_list = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or in_list and not re.match(r"\S", line)
            spans += [(number, span) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line)]
        before = line
    if indented is not None:
        blocks.append(indented)
    return sorted(blocks, key=lambda block: block.line), spans


def pages(root):
    names = [root / "README.md", root / "SECURITY.md", *sorted((root / "docs").rglob("*.md"))]
    for path in names:
        name = str(path.relative_to(root))
        if path.is_file() and not name.startswith(LEFT_OUT):
            yield name, path.read_text()


# Options

def options_of(help_text):
    return {name for line in help_text.split("\n") for name in re.findall(r"--[a-z][a-z0-9-]*", first_column(line))} | {"--help"}


def first_column(line):
    match = re.match(r"\s{2,8}(-\S.*?)(?=\s{2,}|\s[A-Z(]|$)", line)
    return match[1].split(" ")[0] if match else ""


def subcommands_of(help_text):
    _, _, behind = help_text.partition("\nSubcommands:\n")
    names = []
    for line in behind.split("\n"):
        match = re.match(r"  ([a-z]+)\s", line)
        if match is None and line.strip() == "" and names:
            break
        if match:
            names.append(match[1])
    return names


def read_help(folder):
    """{("splice", "kb", "publish"): options}: of every program and subcommand, by their own words."""
    known = {}

    def ask(command):
        text = subprocess.run([folder / command[0], *command[1:], "--help"], capture_output=True, text=True, timeout=60).stdout
        return command, options_of(text), [(*command, name) for name in subcommands_of(text)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, (program,)) for program in PROGRAMS]
        while waiting:
            command, options, below = waiting.pop(0).result()
            known[command] = options
            waiting += [pool.submit(ask, name) for name in below]
    return known


def commands_in(text):
    """[words] of each command of a shell text; what a shell would expand stays as it is."""
    text = re.sub(r"<<-?\s*'?(\w+)'?(.*?)\n.*?\n\s*\1\n", r"\2\n", text, flags=re.S)  # here-documents
    text = re.sub(r"\\\n\s*", " ", text)
    for line in split_lines(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        try:
            words = list(lexer)
        except ValueError:
            words = line.split()
        command = []
        for word in [*words, ";"]:
            if word and set(word) <= set("|&;()"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def split_lines(text):
    """Lines, those within quotes put together."""
    line = ""
    for part in text.split("\n"):
        line = line + "\n" + part if line else part
        plain = re.sub(r"\\.|'[^']*'" + r'|"(?:\\.|[^"\\])*"', "", re.sub(r"(^|\s)#[^\n]*$", "", line))
        if "'" in plain or '"' in plain:
            continue
        yield line
        line = ""
    if line:
        yield from line.split("\n")


def check_command(words, known):
    """Options of one command that its program does not have; None: it is a command of somebody else."""
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("sudo", "exec", "timeout", "$", "time")):
        words = words[1:]
    if not words:
        return None
    program = words[0].rsplit("/", 1)[-1]
    if program not in PROGRAMS:
        return None
    command = (program,)
    unknown = []
    for word in words[1:]:
        if (*command, word) in known:
            command = (*command, word)
        match = re.match(r"--[A-Za-z][\w-]*", word)
        if match and match[0] not in known[command]:
            unknown.append(f"{' '.join(command)} has no option {match[0]}")
    return unknown


def check_options(page, text, known):
    everything = HIDDEN.union(*known.values())
    subcommands = {command[-1]: command for command in known if len(command) > 1}
    blocks, spans = read_page(text)
    for block in blocks:
        if block.language in ("json", "jsonl", "python", "yaml", "mermaid", "text"):
            continue
        for words in commands_in(block.text):
            for mistake in check_command(words, known) or []:
                yield f"{page}:{block.line}: {mistake}"
    for line, span in spans:
        words = span.replace("…", " ").split()
        mistakes = check_command(words, known)
        if mistakes is None and words and words[0] in subcommands:
            mistakes = check_command([*subcommands[words[0]], *words[1:]], known)
        if mistakes is None and words and words[0].startswith("--"):
            names = [re.match(r"-*[\w-]*", word)[0] for word in words if word.startswith("--")]
            mistakes = [f"no program has the option {name}" for name in names if name not in everything]
        for mistake in mistakes or []:
            yield f"{page}:{line}: {mistake}"


# Names

def check_names(page, text, names):
    """Series and programs splice_…; a name with * or … behind it stands for all that begin so."""
    for number, line in enumerate(text.split("\n"), 1):
        for name, rest in re.findall(r"(?<![\w./-])(splice_[a-z0-9_]+)(\*|…)?", line):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            if name in names or base in names or rest and any(known.startswith(name) for known in names):
                continue
            yield f"{page}:{number}: {name} is nowhere in the sources"


def names_in_sources(root):
    names = set()
    for folder in ("kernels", "services", "tools", "tests", "cmake", "proto"):
        for path in (root / folder).rglob("*"):
            if path.suffix in SOURCES and path.is_file() and "tests/docs" not in str(path):
                names |= set(re.findall(r"splice_[a-z0-9_]+", path.read_text(errors="replace")))
    return names


# JSON and requests

class Request:
    def __init__(self, page, line, method, path, body, headers=()):
        self.where = f"{page}:{line}"
        self.method, self.path, self.body, self.headers = method, path, body, dict(headers)


def curl_of(words):
    """(method, URL, body, headers) of a curl command."""
    method, url, body, headers = None, None, None, {}
    takes = {"-X": "method", "--request": "method", "-d": "body", "--data": "body", "--json": "body", "--data-binary": "body",
             "-H": "header", "--header": "header", "-o": "", "-w": "", "--cacert": "", "-m": "", "-u": ""}
    rest = iter(words[1:])
    for word in rest:
        if word in takes:
            value = next(rest, "")
            if takes[word] == "method":
                method = value
            elif takes[word] == "body":
                body = value
            elif takes[word] == "header":
                key, _, text = value.partition(":")
                headers[key.strip()] = text.strip()
        elif not word.startswith("-"):
            url = url or word
    return method or ("GET" if body is None else "POST"), url or "", body, headers


def requests_of(page, text):
    """Requests of a page, and mistakes of its JSON: (requests, mistakes)."""
    requests, mistakes = [], []

    def parse(line, body):
        try:
            return json.loads(body)
        except json.JSONDecodeError as error:
            mistakes.append(f"{page}:{line}: not JSON: {error}")

    blocks, spans = read_page(text)
    for block in blocks:
        if block.language == "json":
            body = parse(block.line, block.text)
            if body is not None and block.marks[:1] == ["request"]:
                requests.append(Request(page, block.line, "POST", block.marks[1], body))
        elif block.language == "jsonl":
            for offset, line in enumerate(block.text.splitlines(), 1):
                parse(block.line + offset, line)
        elif block.language in ("", "sh", "bash"):
            for words in commands_in(block.text):
                if words[0] == "grpcurl" and "-d" in words[:-1]:
                    parse(block.line, words[words.index("-d") + 1])
                if words[0] != "curl":
                    continue
                method, url, body, headers = curl_of(words)
                body = None if body is None or body.startswith(("@", "$")) else parse(block.line, body)
                match = re.match(r"(?:https?://)?" + re.escape(HTTP) + r"(/\S*)", url)
                if match and "run" not in block.marks:
                    requests.append(Request(page, block.line, method, match[1], body, headers))
    for line, span in spans:
        if not re.match(r'\{\s*"splice":|"splice":', span) or "…" in span:
            continue
        body = parse(line, span if span.startswith("{") else "{" + span + "}")
        if body is None:
            continue
        if "segments" in body["splice"]:
            requests.append(Request(page, line, "POST", "/v1/completions", {"prompt": list(range(500, 900)), **body}))
        else:
            requests.append(Request(page, line, "POST", "/v1/chat/completions",
                                    {"messages": [{"role": "user", "content": "Hello"}], **body}))
    return requests, mistakes


def send(request, http):
    """None, or what the server has against it. Answers are kept short: it is the fields that are looked at."""
    body = request.body
    if isinstance(body, dict) and request.path.endswith("completions"):
        body = {**body, "max_tokens": min(8, body.get("max_tokens") or 8)}
        body.pop("min_tokens", None)
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **request.headers}
    try:
        call = urllib.request.Request(f"http://{http}{request.path}", data, headers, method=request.method)
        with urllib.request.urlopen(call, timeout=BLOCK_SECONDS) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"{request.where}: {request.method} {request.path}: {error.code} {error.read().decode()[:300]}"
    except OSError as error:
        return f"{request.where}: {request.method} {request.path}: {error}"
    for line in text.split("\n"):
        if line.startswith('data: {"error"'):
            return f"{request.where}: {request.method} {request.path}: {line[:300]}"
    return None


# Commands

class Program:
    """A program that runs until it is ended; ready once it prints a line that begins so."""

    def __init__(self, command, folder, environment):
        self.output = []
        self.ready = threading.Event()
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.output.append(line)
            if line.startswith("ready"):
                self.ready.set()
        self.ready.set()

    def wait(self):
        """None, or what went wrong."""
        self.ready.wait(BLOCK_SECONDS)
        if any(line.startswith("ready") for line in self.output):
            return None
        return "was not ready: " + "".join(self.output)[-500:]

    def stop(self):
        for end in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, end)
                try:
                    self.process.wait(5)
                except subprocess.TimeoutExpired:
                    pass


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


NUMBER = r"\d+(?:[.,]\d+)*"


def same(expected, printed):
    """Whether a line is another but for blanks and numbers: those may be 10 % off, times and rates anything."""
    shape = r"(" + NUMBER + r")(?=\s*(ms|s|tokens/s|GB/s|requests/s)?\b)"
    pattern = r"\s+".join(".*".join(re.escape(part) for part in word.split("…"))
                          for word in re.sub(NUMBER, "0", expected).split())
    if not re.fullmatch(pattern, " ".join(re.sub(NUMBER, "0", printed).split())):
        return False
    if "…" in expected:
        return True
    for (wanted, unit), (found, _) in zip(re.findall(shape, expected), re.findall(shape, printed)):
        wanted, found = (float(number.replace(",", "")) if number.count(".") < 2 else 0 for number in (wanted, found))
        if not unit and abs(found - wanted) > 0.1 * wanted:
            return False
    return True


def missing(expected, printed):
    """The first line of `expected` that does not stand in `printed`, in this order; None: they all do."""
    lines = iter(printed.split("\n"))
    for line in expected.strip("\n").split("\n"):
        if not any(same(line, other) for other in lines):
            return line
    return None


class Session:
    """Runs what a page marks as runnable."""

    def __init__(self, root, folder_of_programs, http, grpc):
        self.ports = {HTTP: http, GRPC: grpc}
        self.own = set()  # addresses of the page's own programs
        self.programs = []
        self.folder = tempfile.TemporaryDirectory()
        self.home = pathlib.Path(self.folder.name)
        for name in ("models", "deploy", "tools", "tests"):
            (self.home / name).symlink_to(root / name)
        (self.home / "build").mkdir()
        (self.home / "build" / "bin").symlink_to(folder_of_programs)
        (self.home / "python").mkdir()
        for module in ("openai", "anthropic"):
            (self.home / "python" / f"{module}.py").write_text(FAKE_CLIENTS)
        self.real = folder_of_programs
        self.wrapped = self.home / ".bin"
        self.wrapped.mkdir()
        self.environment = {**os.environ, "PATH": f"{self.wrapped}:{folder_of_programs}:{os.environ['PATH']}", "HOME": str(self.home),
                            "PYTHONPATH": str(self.home / "python"), "PYTHONDONTWRITEBYTECODE": "1"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for program in self.programs:
            program.stop()
        self.folder.cleanup()

    def has(self, file):
        return (self.real / file).exists()

    def here(self, text):
        return re.sub(ADDRESS, lambda match: self.ports.get(match[0], match[0]), text)

    def back(self, text):
        for address, own in self.ports.items():
            text = text.replace(own, address)
        return text

    def start(self, block):
        for address in set(re.findall(ADDRESS, block.text)):
            if address not in self.own:
                self.own.add(address)
                self.ports[address] = f"127.0.0.1:{free_port()}"
        started = []
        for words in commands_in(self.here(block.text)):
            self.programs.append(Program(["bash", "-c", "exec " + shlex.join(words)], self.home, self.environment))
            started.append(self.programs[-1])
        mistakes = [program.wait() for program in started]
        return "\n".join(mistake for mistake in mistakes if mistake) or None, self.back("".join(started[-1].output))

    def run(self, block):
        """(None or what went wrong, what it printed)."""
        text = self.here(block.text)
        wrapper = self.wrapped / "splice"
        wrapper.write_text(WRAPPER.format(real=self.real, http=self.ports[HTTP]))
        wrapper.chmod(0o755)
        command = ["bash", "-euo", "pipefail", "-c", text] if block.language != "python" else [sys.executable, "-c", text]
        status = next((int(mark[7:]) for mark in block.marks if mark.startswith("status=")), 0)
        try:
            done = subprocess.run(command, cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, timeout=BLOCK_SECONDS)
        except subprocess.TimeoutExpired as error:
            return f"still ran after {BLOCK_SECONDS} s: {str(error.output)[-500:]}", ""
        printed = self.back(done.stdout)
        return (None if done.returncode == status else f"exit status {done.returncode}: {printed[-600:]}"), printed


SKIPPED = "(a block that was skipped)"


def run_page(page, text, session):
    """Mistakes of what a page runs and asks, in the order of the page."""
    requests, _ = requests_of(page, text)
    blocks, _ = read_page(text)
    steps = [(block.line, block) for block in blocks] + [(int(request.where.rsplit(":", 1)[1]), request) for request in requests]
    printed = None
    for _, step in sorted(steps, key=lambda step: step[0]):
        if isinstance(step, Request):
            mistake = send(step, session.ports[HTTP])
            if mistake:
                yield mistake
            continue
        mistake = None
        if "output" in step.marks and printed is SKIPPED:
            continue
        if "output" in step.marks and printed is not None:
            line = missing(step.text, printed)
            if line is not None:
                mistake = f"not printed: {line!r}; it was: {printed[-1500:]}"
        elif "background" in step.marks:
            mistake, printed = session.start(step)
        elif "run" in step.marks:
            lacking = next((mark[5:] for mark in step.marks if mark.startswith("with=") and not session.has(mark[5:])), None)
            if lacking is None:
                mistake, printed = session.run(step)
            else:
                print(f"{page}:{step.line}: skipped, there is no {lacking}", file=sys.stderr)
                printed = SKIPPED
        elif "output" in step.marks:
            mistake = "output of nothing that ran"
        if mistake:
            yield f"{page}:{step.line}: {mistake}"


def check_text(page, text, known, names):
    yield from check_options(page, text, known)
    yield from check_names(page, text, names)
    yield from requests_of(page, text)[1]


def serve(root, folder):
    """(the server, HTTP address, gRPC address)."""
    data = tempfile.TemporaryDirectory()
    server = Program([folder / "splice", "serve", "--model", root / "models/splice-tiny", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
                      "--backend", "cpu", "--kv-bytes", "512MiB", "--data-dir", data.name, "--log-level", "warning"], root, None)
    server.data = data
    mistake = server.wait()
    if mistake:
        server.stop()
        sys.exit(f"splice serve {mistake}")
    http, grpc = re.findall(r"127\.0\.0\.1:\d+", next(line for line in server.output if line.startswith("ready")))[:2]
    return server, http, grpc


def check(root, folder):
    mistakes = []
    known = read_help(folder)
    names = names_in_sources(root)
    texts = list(pages(root))
    for page, text in texts:
        mistakes += check_text(page, text, known, names)
    server, http, grpc = serve(root, folder)
    ran = 0
    try:
        for page, text in texts:
            with Session(root, folder, http, grpc) as session:
                begin = time.monotonic()
                mistakes += run_page(page, text, session)
                if os.environ.get("DOCS_TEST_TIMES"):
                    print(f"{page}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
            ran += len(requests_of(page, text)[0]) + sum(bool({"run", "background"} & set(b.marks)) for b in read_page(text)[0])
    finally:
        server.stop()
        server.data.cleanup()
    for line in mistakes:
        print(line)
    if mistakes:
        sys.exit(f"{len(mistakes)} mistakes")
    print(f"{len(texts)} pages, {ran} requests and blocks that were run, {sum(map(len, known.values()))} options")


# The checks themselves

HELP = """Usage: splice [OPTIONS] SUBCOMMAND

Options:
  -h,--help                   Print this help message and exit
  --quiet{false}              Says nothing, not even --loud
[Option Group: model]
  Options:
    --model DIR REQUIRED        A folder

Subcommands:
  serve                       Serves
  kb                          Knowledge bases

Example:
  splice serve --nothing
"""


def self_test():
    assert options_of(HELP) == {"--help", "--quiet", "--model"}, options_of(HELP)
    assert subcommands_of(HELP) == ["serve", "kb"], subcommands_of(HELP)
    known = {("splice",): {"--help"}, ("splice", "serve"): {"--model", "--http"}, ("splice-decode",): {"--listen"}}

    def options(text):
        return list(check_options("page", text, known))

    good = ("```sh\nsplice serve --model DIR \\\n  --http 127.0.0.1:0  # --not-this\nhelm install --set x=1\nX=1 build/bin/splice-decode --listen H:1\n"
            "cat > f <<'END'\nsplice serve --nor-this\nEND\n```\n`--http`, `serve --model`, `kubectl get --all`, `splice-decode --listen HOST`\n")
    assert not options(good), options(good)
    for bad in ("```sh\nsplice serve --modle DIR\n```\n", "```\necho x | splice-decode --listen=H --http h\n```\n", "`--modle DIR` is one\n",
                "see `splice-decode --model`\n", "\n    splice serve --modle DIR\n\ntext\n", "```sh\nsplice --model D serve\n```\n", "`serve --listen`\n",
                "```sh\ncd x && splice serve \\\n  --hpp 1\n```\n"):
        assert len(options(bad)) == 1, (bad, options(bad))
    assert not list(check_names("page", "`splice_a_total` and splice_h_bucket, splice_a*, docs/splice_x.svg\n", {"splice_a_total", "splice_h"}))
    assert len(list(check_names("page", "`splice_b_total`{x}\n", {"splice_a_total"}))) == 1
    assert len(list(check_names("page", "splice_b*\n", {"splice_a_total"}))) == 1

    def bodies(text):
        return requests_of("page", text)

    assert len(bodies('```json\n{"a": …}\n```\n')[1]) == 1
    assert len(bodies("```sh\ncurl http://127.0.0.1:8000/v1/x -d '{\"a\": 1,}'\n```\n")[1]) == 1
    assert len(bodies("```jsonl\n{}\n{\n```\n")[1]) == 1
    assert len(bodies("```sh\ngrpcurl -plaintext -d '{' 127.0.0.1:8001 spl.v1.Inference/Generate\n```\n")[1]) == 1
    assert bodies('```json\n{"a": 1}\n```\n') == ([], [])
    asked, wrong = bodies("```sh\ncurl http://127.0.0.1:8000/v1/x -H 'X-Y: z' -d '{\n \"a\": 1}'\ncurl 127.0.0.1:8000/healthz\n```\n"
                          '```json request /v1/completions\n{"prompt": "x"}\n```\nand `{"splice": {"reuse": "exact"}}`\n')
    assert not wrong and [(r.method, r.path) for r in asked] == [
        ("POST", "/v1/x"), ("GET", "/healthz"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")], asked
    assert asked[0].body == {"a": 1} and asked[0].headers == {"X-Y": "z"}
    self_test_running()
    print("the checks find what they should")


def self_test_running():
    """Against a server that refuses fields called `bad`."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = b'{"choices": [{"message": {"content": "yes"}}]}' if "bad" not in body else b'{"error": "bad: is not a known field"}'
            self.send_response(200 if "bad" not in body else 400)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    http = f"127.0.0.1:{server.server_port}"
    python = ('```python run\nfrom openai import OpenAI\na = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="x").chat.completions.create('
              'messages=[], extra_body={%s})\nprint(a.choices[0].message.content)\n```\n')
    background = "```sh background\nbash -c 'echo ready 127.0.0.1:7101; sleep 60'\n```\n"
    pages_and_mistakes = [
        ('```json request /v1/chat/completions\n{"messages": []}\n```\n', None),
        ('```json request /v1/chat/completions\n{"messages": [], "bad": 1}\n```\n', "is not a known field"),
        ("```sh\ncurl http://127.0.0.1:8000/v1/completions -d '{\"bad\": 1}'\n```\n", "is not a known field"),
        ('`{"splice": {}, "bad": 1}`\n', "is not a known field"),
        ("```sh run\ntrue\n```\n", None),
        ("```sh run\nfalse\ntrue\n```\n", "exit status 1"),
        ("```sh run status=3\nexit 3\n```\n", None),
        ("```sh run status=3\ntrue\n```\n", "exit status 0"),
        ("```sh\nfalse\n```\n", None),
        ("```sh run\necho a 17 b\necho c\n```\n\n```text output\na … b\nc\n```\n", None),
        ("```sh run\necho a 17 b\n```\n\n```text output\na … c\n```\n", "not printed"),
        ("```sh run\necho 17.5 ms, 100 of x1\n```\n\n```text output\n3 ms,  95 of x1\n```\n", None),
        ("```sh run\necho 17.5 ms, 100 of x1\n```\n\n```text output\n3 ms, 80 of x1\n```\n", "not printed"),
        ("```sh run\necho > f; echo 127.0.0.1:8000\n```\n```sh run\ntest -f f\n```\n", None),
        ("```text output\na\n```\n", "output of nothing"),
        ("```sh run with=no-such-file\nfalse\n```\n\n```text output\na\n```\n", None),
        ("```sh run with=env\nfalse\n```\n", "exit status 1"),
        (python % "" + "```text output\nyes\n```\n", None),
        (python % '"bad": 1', "exit status 1"),
        (background + "```text output\nready 127.0.0.1:7101\n```\n", None),
        (background, None),
        ("```sh background\nfalse\n```\n", "was not ready"),
    ]
    for text, mistake in pages_and_mistakes:
        with Session(pathlib.Path.cwd(), pathlib.Path("/usr/bin"), http, "127.0.0.1:1") as session:
            found = list(run_page("page", text, session))
        assert len(found) == (mistake is not None) and (mistake is None or mistake in found[0]), (text, found)
    server.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=pathlib.Path)
    parser.add_argument("bin", nargs="?", type=pathlib.Path)
    parser.add_argument("--self-test", action="store_true")
    flags = parser.parse_args()
    if flags.self_test:
        return self_test()
    if flags.bin is None:
        parser.error("ROOT and BIN are required")
    check(flags.root.resolve(), flags.bin.resolve())


if __name__ == "__main__":
    main()
