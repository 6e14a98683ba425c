"""Helpers for tests of ranks in several processes: start them as a launcher does, and check how they end."""
import itertools
import pathlib
import socket
import subprocess
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from program import PROGRAM, ProgramTest  # noqa: E402

SHAPE = ["--threads", "1", "--update-threads", "1", "--seq-len", "16", "--micro-batch", "2", "--device", "host"]
WORK = [*SHAPE, "--grad-accum", "4"]
COMPARED = ("step", "loss", "grad_norm", "lr", "skipped", "eval_loss")
TOKEN = "a secret of the tests"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def rank_environment(rank, count, port, **changes):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": port, "TANDEM_TOKEN": TOKEN, **changes}
    return {name: str(value) for name, value in place.items() if value is not None}


class ProcessesTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.counter = itertools.count()

    def new_out(self):
        return self.root / f"run{next(self.counter)}"

    def command(self, *flags, model="tiny-gpt2", work=WORK):
        return ["train", "--model", model, "--data", self.text, *work, "--lr", "1e-3", *flags]

    def run_in(self, processes, *words):
        """One process, or several of a launch."""
        return self.run_program(*words) if processes == 1 else self.run_program("launch", "--processes", processes, "--", *words)

    def train_in(self, processes, *flags, out=None, **more):
        out = out or self.new_out()
        self.succeed(self.run_in(processes, *self.command(*flags, **more), "--out", out))
        summary = self.summary(out)
        self.assertEqual((summary["ranks"], summary["processes"]), (processes, processes))
        return out

    def course(self, out):
        summary = self.summary(out)
        steps = [[step.get(key) for key in COMPARED] for step in self.metrics(out)]
        return steps, [summary[key] for key in ("state_digest", "final_loss", "eval_loss", "tokens", "skipped_steps",
                                                "compute_key", "parameters")]

    def ranks(self, words, count=2, port=None, each=None, environments=None):
        """Processes of one launch as a launcher starts them; `each(rank)`: more words of one."""
        port = port or free_port()
        started = []
        for rank in range(count):
            place = environments[rank] if environments else rank_environment(rank, count, port)
            more = each(rank) if each else []
            process = subprocess.Popen([PROGRAM, *map(str, [*words, *more])], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True, env={**self.environment(), **place})
            self.end_after_the_test(process)
            started.append(process)
        return started

    def end_after_the_test(self, process):
        for end in (process.stdout, process.stderr):
            if end:
                self.addCleanup(end.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)

    def ends_of(self, processes, seconds=60):
        """Exit codes and lines of errors, by rank."""
        ends = [None] * len(processes)

        def take(rank):
            _, errors = processes[rank].communicate(timeout=seconds)
            lines = [line for line in errors.splitlines() if line.startswith("tandem: error:")]
            ends[rank] = processes[rank].returncode, lines[0] if lines else errors
        threads = [threading.Thread(target=take, args=[rank]) for rank in range(len(processes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends

    def refused_on_all(self, code, *words, **launch):
        for end in self.ends_of(self.ranks(**launch)):
            self.assertEqual(end[0], code, end)
            for word in words:
                self.assertIn(word, end[1])
