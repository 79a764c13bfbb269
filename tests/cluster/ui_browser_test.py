#!/usr/bin/env python3
"""The operators' page as a person uses it: a headless Chromium in front of `splice serve`, at three widths. Exit status 77 (skipped)
without the browser or the program. ui_pictures.py takes the documentation's pictures."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.request

import chromium

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPLICE = pathlib.Path(os.environ.get("SPLICE_BIN_DIR", ROOT / "build" / "bin")) / "splice"
WIDTHS = (480, 768, 1280)
OPERATOR, TENANT = "key-of-an-operator", "key-of-a-tenant"
PROMPT = "Ship 3 left port 7. " * 12

if not SPLICE.exists() or not os.path.exists(chromium.BROWSER):
    print(f"needs {SPLICE} and {chromium.BROWSER}", file=sys.stderr)
    sys.exit(77)


class Cluster:
    def __init__(self, folder):
        keys = pathlib.Path(folder) / "keys"
        keys.write_text(f"{TENANT} alice\n{OPERATOR} olga role=operator\n")
        self.process = subprocess.Popen(
            [SPLICE, "serve", "--model", "models/splice-tiny", "--backend", "cpu", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
             "--kv-bytes", "256MiB", "--store-memory-bytes", "64MiB", "--api-keys", str(keys),
             "--trace-ui-url", "https://traces.example/trace/{trace_id}"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
        ready = next((line for line in self.process.stdout if line.startswith("ready ")), "")
        self.address = re.search(r"http=(?:http://)?(\S+)", ready).group(1)
        self.url = f"http://{self.address}/ui"

    def call(self, path, body=None, key=OPERATOR, request_id=None, **more):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **more}
        if request_id:
            headers["X-Request-Id"] = request_id
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://{self.address}{path}", data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def complete(self, request_id, max_tokens=4, **splice):
        return self.call("/v1/completions", {"model": "splice-tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0,
                                             **({"splice": splice} if splice else {})}, TENANT, request_id)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.cluster = Cluster(cls.folder.name)
        cls.addClassCleanup(cls.folder.cleanup)
        cls.addClassCleanup(cls.cluster.close)
        cls.browser = chromium.Browser(cls.folder.name)
        cls.addClassCleanup(cls.browser.close)
        cls.cluster.complete("first-of-two")
        cls.cluster.complete("second-of-two", 40, reuse="exact")

    def setUp(self):
        self.page = self.browser.page()

    def tearDown(self):
        # Without a key the first calls are refused, which the console says.
        complaints = [line for line in self.page.complaints() if "status of 401" not in line]
        self.assertEqual(complaints, [])

    def enter(self, section, width=1280, height=900):
        """The page in a section, with the operator's key."""
        page = self.page
        page.size(width, height)
        page.open(f"{self.cluster.url}#{section}")
        page.wait("!document.getElementById('ask').hidden || document.getElementById('state').textContent === 'ready'")
        if page.run("!document.getElementById('ask').hidden"):
            page.type("#key", OPERATOR)
            page.press("#ask button")
        page.wait("document.getElementById('state').textContent === 'ready' && document.getElementById('ask').hidden")
        return page

    def go(self, section):
        self.page.run(f"location.hash = {json.dumps(section)}")

    def assert_fits(self, where):
        wide, room = self.page.run("[document.documentElement.scrollWidth, innerWidth]")
        self.assertLessEqual(wide, room, where)

    def wait_for_points(self, least=2):
        # A sample is made every five seconds.
        self.page.wait(f"[...document.querySelectorAll('.plot svg')].length >= 8 && "
                       f"[...document.querySelectorAll('.plot svg')].every(s => s.dataset.points >= {least})")

    def test_the_page_asks_for_a_key_and_refuses_a_tenants(self):
        page = self.page
        page.size(768)
        page.open(self.cluster.url)
        page.wait("!document.getElementById('ask').hidden")
        self.assertNotIn("splice-tiny", page.run("document.body.innerText"))
        page.type("#key", TENANT)
        page.press("#ask button")
        page.wait("document.getElementById('problem').textContent.includes('role=operator')")
        page.run("document.getElementById('key').value = ''")
        page.type("#key", OPERATOR)
        page.press("#ask button")
        page.wait("document.getElementById('ask').hidden && document.getElementById('problem').hidden")
        self.assertIn("splice-tiny", page.run("document.body.innerText"))
        self.assertEqual([line for line in page.complaints() if not re.search("status of 40[13]", line)], [])
        self.page.browser.events.clear()

    def test_every_section_fits_at_every_width(self):
        for width in WIDTHS:
            page = self.enter("overview", width)
            self.wait_for_points()
            self.assert_fits(f"overview {width}")
            self.go("workers")
            page.wait("document.querySelectorAll('#workerlist tbody button').length === 2")
            page.press("#workerlist tbody button")
            self.assert_fits(f"workers {width}")
            self.go("requests/second-of-two")
            page.wait("!document.getElementById('detail').hidden && document.querySelectorAll('#recent tbody tr').length >= 2")
            self.assert_fits(f"requests {width}")
            page.press("#anew")
            self.go("chat?prompt=" + "wide" * 60)
            page.wait("document.getElementById('prompt').value.startsWith('widewide')")
            self.assertEqual(page.run("document.getElementById('messages').children.length"), 0, "a link sends nothing")
            page.press("#send")
            page.wait("/ended/.test(document.getElementById('receipt').textContent)")
            self.assert_fits(f"chat {width}")

    def test_charts_show_what_was_measured(self):
        page = self.enter("overview")
        self.wait_for_points()
        drawn = page.run("document.querySelectorAll('#charts polyline, #charts circle, #charts polygon').length")
        self.assertGreaterEqual(drawn, 8)
        # What the chart says in words is what the router says in numbers.
        history = self.cluster.call("/control/v1/history?seconds=1800")
        rates = [rate for rate in history["columns"]["output_tokens_per_second"] if rate]
        said = page.run("document.querySelector('#chart-tokens svg').getAttribute('aria-label')")
        self.assertRegex(said, r"Output tokens a second\. tokens/s .*, at most [0-9.,]+")
        if rates:
            most = float(re.search(r"at most ([0-9.,]+[0-9])", said)[1].replace(",", ""))
            self.assertGreaterEqual(most, 0.98 * max(rates[:-1], default=0))
        # The cross hair by keys, and the table behind it.
        page.run("document.querySelector('#chart-queue svg').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
        self.assertRegex(page.run("document.querySelector('#chart-queue .tip').innerText"), r"\d\d:\d\d:\d\d\s+running \d+\s+waiting \d+")
        page.press("#chart-queue summary")
        page.wait("document.querySelectorAll('#chart-queue tbody tr').length >= 2")
        page.press("#ranges button")
        self.assertEqual(page.run("[...document.querySelectorAll('#ranges button')].map(b => b.getAttribute('aria-pressed')).join()"),
                         "true,false,false")

    def test_light_and_dark_are_chosen_by_the_system(self):
        page = self.enter("overview")
        grounds = []
        for dark in (False, True):
            page.dark(dark)
            red, text = page.run("['backgroundColor', 'color'].map(p => Number(getComputedStyle(document.body)[p].match(/\\d+/)[0]))")
            self.assertGreater(abs(red - text), 150)
            grounds.append(red)
        self.assertGreater(grounds[0] - grounds[1], 150)

    def test_a_request_shows_its_stages_and_what_ran(self):
        page = self.enter("requests")
        page.wait("document.querySelectorAll('#recent tbody tr').length >= 2")
        page.type("#filter", "second-of")
        self.assertEqual(page.run("document.querySelectorAll('#recent tbody tr').length"), 1)
        page.press("#recent tbody a")
        page.wait("!document.getElementById('detail').hidden")
        text = page.run("document.getElementById('detail').innerText")
        record = self.cluster.call("/control/v1/requests/second-of-two")
        self.assertIn("exact · asked: exact", text)
        self.assertIn(record["trace_id"], text)
        self.assertIn(f"{record['tokens']['prompt']} in, 40 out", text)
        stages = page.run("[...document.querySelectorAll('#detail .stages > span:nth-child(3n+1)')].map(s => s.textContent)")
        self.assertEqual(sorted(stages), sorted(name.replace("_", " ") for name in record["seconds"]["ttft_stages"]))
        self.assertIn("decoding", text)
        self.go("requests/first-of-two")
        page.wait("document.getElementById('detail').innerText.includes('first-of-two')")
        self.assertIn("exact · asked: auto", page.run("document.getElementById('detail').innerText"))
        page.press("#detail a")
        page.wait("document.getElementById('detail').hidden")

    def test_a_traced_request_has_a_link_and_a_worker_its_version(self):
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        self.cluster.call("/v1/completions", {"model": "splice-tiny", "prompt": "Ship 4", "max_tokens": 1}, TENANT, "traced",
                          traceparent=f"00-{trace}-00f067aa0ba902b7-01")
        page = self.enter("requests/traced")
        link = f"document.querySelector('#detail a[href=\"https://traces.example/trace/{trace}\"]')"
        page.wait(f"!!{link}")
        self.assertEqual(page.run(f"{link}.textContent"), trace)
        self.assertIn("noopener", page.run(f"{link}.rel"))
        self.go("requests/first-of-two")
        page.wait("document.getElementById('detail').innerText.includes('first-of-two')")
        self.assertEqual(page.run("document.querySelectorAll('#detail a[target]').length"), 0, "nobody recorded its spans")
        self.go("workers")
        page.wait("document.querySelectorAll('#workerlist tbody button').length === 2")
        status = self.cluster.call("/control/v1/status")
        cells = page.run("[...document.querySelectorAll('#workerlist tbody tr')].map(r => [r.cells[7].textContent, r.cells[7].className])")
        for text, tone in cells:
            self.assertEqual(text, f"{status['version']} ({status['commit']})")
            self.assertNotIn("warn", tone, "the router's own version")

    def test_drains_a_worker_and_takes_it_back(self):
        page = self.enter("workers")
        page.wait("document.querySelectorAll('#workerlist tbody button').length === 2")
        worker = page.run("document.querySelector('#workerlist tbody tr').dataset.key")

        def is_draining():
            return {w["worker"]: w["draining"] for w in self.cluster.call("/control/v1/workers")["data"]}[worker]

        page.press("#workerlist tbody button")
        self.assertFalse(is_draining(), "nothing happens before it is confirmed")
        self.assertIn("last prefill worker", page.run("document.getElementById('switch').innerText"))
        for draining, word in ((True, "draining"), (False, "ready")):
            page.press("#switch-yes")
            page.wait(f"document.querySelector('#workerlist tbody tr').cells[2].textContent === '{word}'")
            self.assertEqual(is_draining(), draining)
            page.wait("document.getElementById('switch').hidden && !document.getElementById('switched').classList.contains('bad')")
            if draining:
                page.press("#workerlist tbody button")

    def test_chat_streams_with_its_receipt(self):
        page = self.enter("chat")
        page.press("details summary")
        page.run("document.getElementById('max-tokens').value = 48; document.getElementById('temperature').value = 0")
        # Every state of the receipt, as it is drawn.
        page.run("window.seen = []; new MutationObserver(() => seen.push(document.getElementById('receipt').innerText))"
                 ".observe(document.getElementById('receipt'), {childList: true})")
        page.type("#prompt", "Which port did ship 4 leave?")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13)
        page.wait("/ended/.test(document.getElementById('receipt').textContent)")
        self.assertTrue(page.run("document.querySelector('#messages .assistant').innerText.trim().length > 0"))
        seen = page.run("seen")
        self.assertTrue(any("streaming" in text for text in seen), "it is there while the answer streams")
        last = seen[-1]
        self.assertRegex(last, r"output tokens\s+\d+")
        for name in ("first token", "tokens a second", "cached", "aligned", "recomputed", "computed", "reuse that ran", "decode that ran"):
            self.assertIn(name, last)
        request = page.run("document.querySelector('#receipt a').textContent")
        record = self.cluster.call(f"/control/v1/requests/{request}")
        self.assertRegex(last, rf"output tokens\s+{record['tokens']['completion']}\b")
        self.assertRegex(last, rf"prompt tokens\s+{record['tokens']['prompt']}\b")

    def test_chat_stops_when_it_is_told(self):
        page = self.enter("chat")
        page.run("document.getElementById('max-tokens').value = 4000; document.getElementById('temperature').value = 0")
        page.type("#prompt", "Count.")
        page.press("#send")
        page.wait("/streaming|ended/.test(document.getElementById('receipt').textContent)")
        page.press("#stop")
        page.wait("/stopped|ended/.test(document.getElementById('receipt').textContent)")
        page.wait("!document.getElementById('send').disabled")

    def test_series_are_cut_stacked_and_marked(self):
        page = self.enter("overview")
        result = page.run("""import('/ui/series.js').then(s => ({
          runs: s.runs([1, null, 2, 3, 4], [false, false, false, false, true]),
          stack: s.stack([[1, null], [2, 5]]),
          ticks: [s.ticks(1, 3), s.ticks(4, 3, true), s.ticks(0.037, 3).length],
          clip: s.clip({period_seconds: 5, unix_ms: [0, 5e3, 10e3, 60e3], columns: {a: [1, 2, 3, 4]}}, [{column: 'a'}], 55),
          empty: s.clip({period_seconds: 5, unix_ms: [], columns: {a: []}}, [{column: 'a'}], 60).values}))""")
        self.assertEqual(result["runs"], [[0, 1], [2, 4], [4, 5]])
        self.assertEqual(result["stack"], [[1, 0], [3, 5]])
        self.assertEqual(result["ticks"], [[0, 0.5, 1], [0, 2, 4], 3])
        self.assertEqual(result["clip"]["times"], [0, 5e3, 10e3, 60e3], "a minute at least")
        self.assertEqual(result["clip"]["breaks"], [False, False, False, True])
        self.assertEqual(result["empty"], [[]])


if __name__ == "__main__":
    unittest.main()
