"""`splice serve` with splice-tiny and a chat template with a place for tools, for checks with clients of others."""
import contextlib
import pathlib
import re
import subprocess
import tempfile
import threading

MODEL = pathlib.Path("models/splice-tiny")
# Calls are written as Hermes does.
TEMPLATE = ('{% if tools %}Call by <tool_call>{"name": …, "arguments": …}</tool_call>:'
            "{% for t in tools %} {{ t.function | tojson }}{% endfor %}\n{% endif %}"
            "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
            "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")


@contextlib.contextmanager
def server(splice):
    """The address of the HTTP API, http://HOST:PORT."""
    with tempfile.TemporaryDirectory() as folder:
        for file in MODEL.iterdir():
            if file.name != "chat_template.jinja":
                (pathlib.Path(folder) / file.name).symlink_to(file.resolve())
        (pathlib.Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
        process = subprocess.Popen([splice, "serve", "--model", folder, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            address = next((re.search(r"127\.0\.0\.1:\d+", line) for line in process.stdout if line.startswith("ready")), None)
            assert address, "splice serve did not start"
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield "http://" + address.group()
        finally:
            process.terminate()
            process.wait(timeout=20)
