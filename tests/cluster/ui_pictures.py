#!/usr/bin/env python3
"""Takes the documentation's pictures of the operators' page: `splice serve` with splice-tiny under load, in a headless Chromium.

    python3 tests/cluster/ui_pictures.py DIR     writes DIR/ui-overview.png and DIR/ui-request.png"""
import pathlib
import subprocess
import sys
import tempfile

import chromium
from ui_browser_test import OPERATOR, ROOT, SPLICE, TENANT, Cluster

# One load after the other, so that the charts have hills: prompts that share nothing, prompts that share their beginning, conversations.
LOADS = (["--concurrency", "3", "--input-tokens", "300", "--output-tokens", "96", "--num-requests", "60"],
         ["--concurrency", "8", "--input-tokens", "600", "--shared-prefix-tokens", "500", "--output-tokens", "64", "--num-requests", "120"],
         ["--concurrency", "5", "--input-tokens", "400", "--shared-prefix-tokens", "256", "--output-tokens", "128", "--num-requests", "60"])


def document_prompt(order):
    """A chat whose marked documents stand in another order than before: their KV is moved, not computed again."""
    documents = [f"Ship {i} left port {i % 7} with grain, and came back with salt. " * 6 for i in range(4)]
    parts = [{"type": "segment", "text": documents[i]} for i in order]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which port did ship 3 leave?"}]}]


def main(folder):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        cluster, browser = Cluster(scratch), chromium.Browser(scratch)
        try:
            for load in LOADS:
                subprocess.run([SPLICE, "bench", "--endpoint", f"http://{cluster.address}", "--api-key", TENANT, *load], cwd=ROOT, check=True,
                               stdout=subprocess.DEVNULL)
            for number, order in enumerate(([0, 1, 2, 3], [2, 0, 3, 1])):
                cluster.call("/v1/chat/completions", {"model": "splice-tiny", "messages": document_prompt(order), "max_tokens": 64},
                             TENANT, f"ships-{number}")
            page = browser.page()
            page.size(1280, 1270)
            page.open(cluster.url)
            page.wait("!document.getElementById('ask').hidden")
            page.type("#key", OPERATOR)
            page.press("#ask button")
            page.wait("document.querySelectorAll('.plot svg').length >= 8 && document.querySelector('.plot svg').dataset.points >= 3")
            page.picture(pathlib.Path(folder) / "ui-overview.png")
            page.size(1280, 900)
            page.run("location.hash = 'requests/ships-1'")
            page.wait("!document.getElementById('detail').hidden")
            page.picture(pathlib.Path(folder) / "ui-request.png")
        finally:
            browser.close()
            cluster.close()


if __name__ == "__main__":
    main(sys.argv[1])
