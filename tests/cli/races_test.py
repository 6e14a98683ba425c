"""The program under ThreadSanitizer, with all its threads at work at once: run by a build for it."""
import json
import os
import signal
import subprocess
import urllib.request

from program import PROGRAM, TEXT, ProgramTest, main, wait_for

RUN = ["--threads", "2", "--update-threads", "2", "--seq-len", "32", "--micro-batch", "2",
       "--device-memory", "24MiB"]


class Races(ProgramTest):
    def setUp(self):
        super().setUp()
        self.few = self.file("few.txt", TEXT[:1500])  # each window takes a hundred times as long as without the sanitizer

    def environment(self):
        options = os.environ.get("TSAN_OPTIONS", "")
        return {**super().environment(), "TSAN_OPTIONS": f"{options} log_path={self.root / 'race'}"}

    def no_report(self):
        for report in self.root.glob("race.*"):
            self.fail(report.read_text())

    def run_quietly(self, *arguments):
        result = self.run_program(*arguments)
        self.no_report()
        return self.succeed(result)

    def test_training_under_every_policy(self):
        digests = set()
        one = [(policy, "host") for policy in ("host", "stream", "interleave:2", "static:0.5", "auto")]
        for i, (policy, device) in enumerate([*one, ("stream", "host,host"), ("interleave:2,resident=0.3", "host,host")]):
            out = self.root / f"run{i}"
            self.run_quietly("train", "--model", "tiny-gpt2", "--data", self.text, "--device", device, *RUN, "--grad-accum", "2",
                             "--policy", policy, "--out", out, "--steps", "4", "--eval-data", self.few, "--eval-every", "2",
                             "--keep-best", "--checkpoint-every", "1", "--trace", self.root / "trace.json")
            digests.add(self.summary(out)["state_digest"])
        self.assertEqual(len(digests), 1)

    def test_a_signal_while_saving_and_scraped(self):
        out = self.root / "run"
        log = self.root / "log"
        with open(log, "w") as stdout:
            process = subprocess.Popen([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), "--device",
                                        "host,host", *RUN, "--grad-accum", "2", "--out", str(out), "--steps",
                                        "100000", "--checkpoint-every", "1", "--metrics-port", "0"],
                                       stdout=stdout, stderr=subprocess.DEVNULL, text=True, env=self.environment())
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        wait_for(lambda: "http://" in log.read_text())
        url = next(word for word in log.read_text().split() if word.startswith("http://"))
        scraped = 0
        while scraped < 50 or not list(out.glob("checkpoints/step-*")):
            with urllib.request.urlopen(url, timeout=60) as answer:
                scraped += answer.status == 200
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)
        self.no_report()
        self.assertEqual(code, 128 + signal.SIGINT)
        self.run_quietly("digest", out)

    def test_the_other_subcommands(self):
        out = self.root / "run"
        self.run_quietly("calibrate", "--device", "host", "--threads", "2", "--update-threads", "2")
        self.run_quietly("train", "--model", "tiny-gpt2", "--data", self.text, "--device", "host", *RUN, "--out", out,
                         "--steps", "2")
        loss = self.run_quietly("eval", "--model", out, "--data", self.few, "--seq-len", "32", "--threads", "2",
                                "--resident-layers", "0", "--json")
        self.assertGreater(json.loads(loss.stdout)["loss"], 0.0)
        self.run_quietly("sample", "--model", out, "--prompt", "The", "--max-tokens", "4", "--threads", "2")
        self.run_quietly("export", out, "--to", self.root / "exported")
        self.run_quietly("bench", "--model", "tiny-gpt2", "--device", "host", *RUN, "--steps", "1", "--policies", "host",
                         "stream", "auto")


if __name__ == "__main__":
    main()
