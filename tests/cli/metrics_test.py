"""The metrics endpoint: what it says, and that no client holds up a step or leaves anything behind."""
import contextlib
import http.client
import os
import random
import re
import shutil
import socket
import subprocess
import time

from program import PROGRAM, SMALL, ProgramTest, main

REQUESTS = 10000
SLOW = 200


class Metrics(ProgramTest):
    def setUp(self):
        super().setUp()
        self.process = subprocess.Popen([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL,
                                         "--steps", "1000000", "--metrics-port", "0", "--log-every", "0"],
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addCleanup(self.process.wait)
        self.addCleanup(self.process.stdout.close)
        self.addCleanup(self.process.kill)
        for line in self.process.stdout:
            found = re.match(r"metrics at http://127\.0\.0\.1:(\d+)/metrics$", line)
            if found:
                self.port = int(found.group(1))
                break
        while "tandem_steps_total" not in self.get()[1]:
            time.sleep(0.02)

    def get(self, path="/metrics", method="GET", body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def steps(self):
        return float(re.search(r"^tandem_steps_total (\S+)$", self.get()[1], re.M).group(1))

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def anonymous_bytes(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status.read()).group(1))

    def test_says_where_the_run_is(self):
        status, text = self.get()
        self.assertEqual(status, 200)
        for name in ["loss", "gradient_norm", "learning_rate", "step_seconds", "tokens_per_second", "device_bytes",
                     "tokens_total", "skipped_steps_total", "steps_planned", "speculated_parameters_total", "confirmed_steps_total",
                     "rolled_back_steps_total"]:
            self.assertRegex(text, rf"(?m)^tandem_{name} [0-9.e+-]+$")
            self.assertRegex(text, rf"(?m)^# HELP tandem_{name} .+\.$")
        self.assertIn('model="tiny-gpt2"', text)
        self.assertEqual(self.get("/")[0], 404)
        self.assertEqual(self.get(method="POST")[0], 405)
        for body in ["x", "x" * 1000000]:
            self.assertEqual(self.get(method="POST", body=body)[0], 405)
            self.assertEqual(self.get(method="GET", body=body)[0], 200)
        self.assertEqual(self.get(method="HEAD"), (200, ""))
        if shutil.which("promtool"):
            checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
            self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))
        else:
            print("skipped: promtool is not installed (Debian: prometheus)")

    def test_slow_and_hostile_clients_change_nothing(self):
        before = self.descriptors()
        with contextlib.ExitStack() as stack:
            slow = []
            for i in range(SLOW):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=30))
                client.sendall([b"GET /met", b"", b"GET /metrics HTTP/1.1\r\nX: "][i % 3])
                slow.append(client)
            chance = random.Random(7)
            for _ in range(50):
                with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client, \
                        contextlib.suppress(OSError):
                    client.sendall(chance.randbytes(chance.choice([1, 100, 70000])))
            here = self.steps()
            for i in range(REQUESTS):
                self.assertEqual(self.get()[0], 200)
                if i == REQUESTS // 10:  # heaps have their size by now
                    settled = self.anonymous_bytes()
            self.assertLess(self.anonymous_bytes() - settled, 1 << 20)  # less than 120 bytes a request
            while self.steps() < here + 3:  # goes on, while all of them are still connected
                time.sleep(0.02)
        while self.descriptors() > before:  # ends, because nothing is leaked
            time.sleep(0.05)
        self.assertIsNone(self.process.poll())


class Refused(ProgramTest):
    def test_ports_and_addresses_that_cannot_be(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.refused(self.train("--steps", "1", "--metrics-port", taken.getsockname()[1]), 5, "--metrics-port")
        self.refused(self.train("--steps", "1", "--metrics-port", "70000"), 2, "--metrics-port")
        self.refused(self.train("--steps", "1", "--metrics-port", "0", "--quiet"), 2, "nobody would learn the port")
        for data in (self.text, self.root / "none"):  # flags are checked before data
            self.refused(self.train("--steps", "1", "--metrics-port", "0", "--metrics-address", "localhost", data=data), 2,
                         "numeric address")


if __name__ == "__main__":
    main()
