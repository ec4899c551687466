"""A server in a process of its own, as `allspark serve` starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import httpx


class ServerProcess:
    """`allspark serve` of a model under the name "demo"."""

    def __init__(self, model, *flags, port=0, prefix=()):
        command = [*prefix, sys.executable, "-m", "allspark.cli", "serve", f"{model}=demo"]
        command += ["--server-name", "127.0.0.1", "--server-port", str(port), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving .*:(\d+)$", line):
                break
        else:
            raise AssertionError("".join(self.log))
        self.port = int(found[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def post(self, path, **body):
        return self.client.post(path, json={"model": "demo", **body})

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        """The exit status and what was logged."""
        _, log = self.process.communicate(timeout=120)
        return self.process.returncode, log

    def kill(self):
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def num_requests(self):
        """Requests that run or wait in the engine."""
        text = self.client.get("/metrics").text
        names = ("allspark_requests_running", "allspark_requests_waiting")
        counts = [re.search(rf'^{name}{{.*}} (\d+)$', text, re.MULTILINE) for name in names]
        return sum(int(count[1]) for count in counts)
