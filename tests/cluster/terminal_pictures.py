#!/usr/bin/env python3
"""Takes the documentation's pictures of the terminal: the demo, `splice chat` and `splice ctl top`, each with splice-tiny at a
pseudo-terminal, drawn by a headless Chromium. Needs pyte, a terminal emulator (pip install pyte).

    python3 tests/cluster/terminal_pictures.py DIR     writes DIR/demo.png, DIR/chat.png and DIR/top.png"""
import fcntl
import html
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

import pyte

import chromium
from ui_browser_test import OPERATOR, ROOT, SPLICE, TENANT, Cluster

COLOURS = {"red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341", "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#76e3ea",
           "black": "#6e7681", "white": "#c9d1d9", "brightblack": "#8b949e"}
GROUND, TEXT = "#0d1117", "#d7dde4"
PAGE = """<meta charset="utf-8"><body style="margin:0;background:%s"><pre style="margin:0;padding:14px 18px;display:inline-block;
font:14px/1.3 'DejaVu Sans Mono',monospace;color:%s">%s</pre>"""


class Terminal:
    """A program at a terminal of that size."""

    def __init__(self, command, columns, rows, **environment):
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color", **environment})
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds=0.2):
        """False: the program has ended."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            data = b""
        # pyte knows no faint text.
        self.stream.feed(data.replace(b"\x1b[2m", b"\x1b[90m").replace(b"\x1b[22m", b"\x1b[22;39m"))
        return bool(data)

    def wait_for(self, pattern, seconds=120):
        end = time.monotonic() + seconds
        while not re.search(pattern, "\n".join(self.screen.display)):
            if not self.read() or time.monotonic() > end:
                raise SystemExit(f"{pattern} never came:\n" + "\n".join(self.screen.display))

    def run_to_the_end(self):
        while self.read(60):
            pass

    def type(self, text):
        os.write(self.fd, text.encode())

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)

    def page(self):
        lines = []
        for y in range(self.screen.lines):
            line = ""
            for x in range(self.screen.columns):
                char = self.screen.buffer[y][x]
                colour = COLOURS.get(char.fg, "#" + char.fg if re.fullmatch("[0-9a-f]{6}", char.fg) else TEXT)
                ground = "transparent"
                if char.reverse:
                    colour, ground = GROUND, colour
                style = f"color:{colour};background:{ground}" + (";font-weight:bold" if char.bold else "")
                text = html.escape(char.data)
                line += text if style == f"color:{TEXT};background:transparent" else f'<span style="{style}">{text}</span>'
            lines.append(line.rstrip())
        while lines and not lines[-1]:
            lines.pop()
        return PAGE % (GROUND, TEXT, "\n".join(lines))


def take(browser, terminal, path):
    file = pathlib.Path(path).with_suffix(".html")
    file.write_text(terminal.page())
    page = browser.page()
    page.open(file.resolve().as_uri())
    page.wait("document.querySelector('pre')")
    width, height = page.run("(r => [Math.ceil(r.width), Math.ceil(r.height)])(document.querySelector('pre').getBoundingClientRect())")
    page.size(width, height)
    page.picture(path)
    file.unlink()
    print(f"{path}: {pathlib.Path(path).stat().st_size / 1024:.0f} KB", file=sys.stderr)


def demo(browser, folder):
    terminal = Terminal(["deploy/demo/run.sh"], 118, 60)
    terminal.run_to_the_end()
    take(browser, terminal, folder / "demo.png")
    terminal.close()


def chat(browser, folder, cluster):
    terminal = Terminal([str(SPLICE), "chat", "--endpoint", f"http://{cluster.address}", "--no-history"], 124, 40, SPLICE_API_KEY=TENANT)
    terminal.wait_for("> $|>\\s*$")
    for turns, text in enumerate(("Lydia Koszoos works at Cockprull Trust. Cockprull Trust is based in Fleameamville. In which city does Lydia Koszoos work?",
                                 "And where does she work?")):
        terminal.type(text + "\r")
        terminal.wait_for(r"(?s)(.*tokens.*){%d}" % (turns + 1))
    terminal.type("/help\r")
    for _ in range(5):
        terminal.read()
    take(browser, terminal, folder / "chat.png")
    terminal.close()


def top(browser, folder, cluster):
    load = subprocess.Popen([SPLICE, "bench", "--endpoint", f"http://{cluster.address}", "--api-key", TENANT, "--concurrency", "6",
                             "--num-requests", "100000", "--input-tokens", "300", "--shared-prefix-tokens", "200", "--output-tokens", "64"],
                            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    terminal = Terminal([str(SPLICE), "ctl", "top", "--url", f"http://{cluster.address}"], 112, 26, SPLICE_API_KEY=OPERATOR)
    end = time.monotonic() + 12
    while time.monotonic() < end:
        terminal.read()
    take(browser, terminal, folder / "top.png")
    terminal.close()
    load.kill()
    load.wait()


def main(folder):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        browser = chromium.Browser(scratch)
        try:
            demo(browser, folder)
            cluster = Cluster(scratch)
            try:
                chat(browser, folder, cluster)
                top(browser, folder, cluster)
            finally:
                cluster.close()
        finally:
            browser.close()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
