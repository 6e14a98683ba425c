"""metrics: steps of a run whose metrics endpoint slow and hostile clients are at, against steps left alone.

tiny-llama on the host device, one thread, so that clients have a core of their own. Spells with and without clients take
turns: 200 that never finish their request, garbage, and 1,000 requests a spell, 10,000 in all, in half of the spell.
"""
import contextlib
import http.client
import json
import random
import re
import shutil
import socket
import statistics
import subprocess
import time

import harness

SPELLS, SECONDS, REQUESTS, SLOW, GARBAGE = 10, 4.0, 1000, 200, 50


def beleaguer(port):
    """One spell of clients."""
    chance = random.Random(7)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        for i in range(SLOW):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            client.sendall([b"GET /met", b"", b"GET /metrics HTTP/1.1\r\nX: "][i % 3])
        for _ in range(GARBAGE):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client, contextlib.suppress(OSError):
                client.sendall(chance.randbytes(chance.choice([1, 100, 70000])))
        for i in range(REQUESTS):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request("GET", "/metrics")
                if connection.getresponse().status != 200:
                    raise harness.BenchError("a request was refused")
            time.sleep(max(0.0, begin + 0.5 * SECONDS * (i + 1) / REQUESTS - time.monotonic()))
        time.sleep(max(0.0, begin + SECONDS - time.monotonic()))


def steps_of(out):
    return len((out / "metrics.jsonl").read_text().splitlines())


def measure():
    harness.build("tandem")
    work = harness.BUILD / "bench-metrics"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    out = work / "run"
    (work / "text.txt").write_bytes(random.Random(1).randbytes(1 << 20).replace(b"\0", b"\1"))
    command = [harness.program("tandem"), "train", "--model", "tiny-llama", "--data", work / "text.txt", "--out", out,
               "--device", "host", "--threads", "1", "--update-threads", "1", "--seq-len", "64", "--micro-batch", "4",
               "--steps", "1000000", "--metrics-port", "0", "--log-every", "0"]
    harness.say("$ " + " ".join(map(str, command)))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=harness.QUIET)
    spells = []
    try:
        port = None
        for line in process.stdout:
            found = re.match(r"metrics at http://127\.0\.0\.1:(\d+)/metrics$", line)
            if found:
                port = int(found.group(1))
                break
        if port is None:
            raise harness.BenchError("the run did not start")
        time.sleep(SECONDS)
        for _ in range(SPELLS):
            begin = steps_of(out)
            time.sleep(SECONDS)
            between = steps_of(out)
            beleaguer(port)
            spells.append((begin, between, steps_of(out)))
    finally:
        process.kill()
        process.wait()
    seconds = [json.loads(line)["step_seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()[:spells[-1][2]]]
    figures = harness.Figures()
    figures.add("step_slowdown", [statistics.mean(seconds[b:c]) / statistics.mean(seconds[a:b]) for a, b, c in spells])
    figures.add("step_seconds", [statistics.mean(seconds[a:b]) for a, b, _ in spells])
    shutil.rmtree(work)
    return figures.line("metrics", requests=SPELLS * REQUESTS, slow_clients=SLOW, spells=SPELLS)
