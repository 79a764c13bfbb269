"""A `splice serve` of its own for a benchmark."""

import contextlib
import os
import re
import subprocess
import threading


@contextlib.contextmanager
def serving(bin_dir, *arguments):
    """Starts it on free ports of this machine and waits until it is ready: (address of the HTTP API, process)."""
    server = subprocess.Popen([os.path.join(bin_dir, "splice"), "serve", *arguments, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        ready = next((line for line in server.stdout if line.startswith("ready")), None)
        if ready is None:
            raise RuntimeError(f"splice serve ended with {server.wait()}")
        threading.Thread(target=server.stdout.read, daemon=True).start()  # a full pipe would hold it up
        yield re.search(r"127\.0\.0\.1:\d+", ready).group(), server
    finally:
        server.terminate()
        server.wait()
