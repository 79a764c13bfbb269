"""Drives a headless Chromium over its DevTools pipe: pages of a width, scripts in them, pictures. Standard library only."""
import base64
import fcntl
import itertools
import json
import os
import pathlib
import select
import subprocess
import time

BROWSER = "/usr/bin/chromium-headless-shell"
# Above all descriptors that the parent of the browser is likely to have.
HIGH = 100


class Failed(Exception):
    """A script in the page has thrown, or the browser has refused a call."""


class Browser:
    """One process. Its profile lies in `folder`."""

    def __init__(self, folder):
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in (to_read, from_write)]

        def place():  # the browser reads calls from 3 and writes answers to 4
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self.log = open(pathlib.Path(folder) / "browser.log", "wb")
        self.process = subprocess.Popen(
            [BROWSER, "--remote-debugging-pipe", "--no-sandbox",  # tests run as root in containers
             "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile", "--hide-scrollbars", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, preexec_fn=place, pass_fds=(3, 4))
        for fd in (to_read, from_write, *theirs):
            os.close(fd)
        self.input, self.output = os.fdopen(to_write, "wb", 0), os.fdopen(from_read, "rb", 0)
        self.rest, self.numbers, self.events = b"", itertools.count(1), []

    def close(self):
        self.input.close()
        self.process.terminate()
        self.process.wait()
        self.output.close()
        self.log.close()

    def _message(self, deadline):
        while b"\0" not in self.rest:
            if not select.select([self.output], [], [], max(0, deadline - time.monotonic()))[0]:
                raise Failed("the browser does not answer")
            read = os.read(self.output.fileno(), 1 << 16)
            if not read:
                raise Failed("the browser has ended")
            self.rest += read
        line, self.rest = self.rest.split(b"\0", 1)
        return json.loads(line)

    def call(self, method, session=None, timeout_s=60, **params):
        number = next(self.numbers)
        call = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self.input.write(json.dumps(call).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._message(deadline)
            if "method" in message:
                self.events.append(message)
            elif message.get("id") == number:
                if "error" in message:
                    raise Failed(f"{method}: {message['error']['message']}")
                return message["result"]

    def page(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        return page


class Page:
    def __init__(self, browser, session):
        self.browser, self.session = browser, session

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def open(self, url):
        self.call("Page.navigate", url=url)

    def size(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, dark):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def run(self, script):
        """The value of an expression, or of its promise."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise Failed(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, condition, timeout_s=40):
        """Until an expression is true; Failed with what the page shows when it never is."""
        seen = self.run("new Promise(done => { const end = Date.now() + %d; const look = () => { let v = false; try { v = (%s); } catch {} "
                        "if (v || Date.now() > end) done(Boolean(v)); else setTimeout(look, 30); }; look(); })" % (timeout_s * 1000, condition))
        if not seen:
            raise Failed(f"never true: {condition}\n{self.run('document.body.innerText')}")

    def press(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector, text):
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def picture(self, path):
        shown = self.call("Page.captureScreenshot", format="png")
        pathlib.Path(path).write_bytes(base64.b64decode(shown["data"]))

    def complaints(self):
        """What scripts have thrown, and what the console has as errors."""
        out = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                out.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                out.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
                out.append(json.dumps(params["args"]))
        return out
