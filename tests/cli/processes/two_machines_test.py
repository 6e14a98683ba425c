"""Ranks on two machines, whose network delays, overtakes, loses, and cuts messages into small pieces: the bits of one process. Where it
is cut, each rank ends with exit code 5, and names the other."""
import json
import pathlib
import socket
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import cable  # noqa: E402
from pieces import InPieces  # noqa: E402
from program import PROGRAM, ProgramTest, main, wait_for  # noqa: E402

MODEL = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2,
         "n_head": 2}
PORT = 29500
REFUSAL = cable.why_not()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class NetworkTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = self.file("config.json", json.dumps(MODEL))

    def command(self, out, *flags, steps=4):
        return [PROGRAM, "train", "--model", self.model, "--data", self.text, "--device", "host", "--threads", "1", "--update-threads",
                "1", "--seq-len", "32", "--grad-accum", "2", "--lr", "1e-3", "--steps", steps, "--out", out, *flags]

    def place(self, rank, address, port):
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port,
                 "TANDEM_TOKEN": "a secret of the tests"}
        return {**self.environment(), **{name: str(value) for name, value in place.items()}}

    def digest_of_one(self):
        out = self.root / "one"
        done = subprocess.run([str(word) for word in self.command(out)], capture_output=True, text=True, env=self.environment())
        self.succeed(done)
        return self.summary(out)["state_digest"]

    def expect_digest(self, processes, out):
        for process in processes:
            errors = process.communicate(timeout=120)[1]
            self.assertEqual(process.returncode, 0, errors)
        summary = self.summary(out)
        self.assertEqual((summary["processes"], summary["state_digest"]), (2, self.digest_of_one()))

    def expect_named(self, processes, addresses, seconds, why):
        """All end within so many seconds, each with a line that names the other."""
        began = time.monotonic()
        for rank, process in enumerate(processes):
            errors = process.communicate(timeout=60)[1]
            self.assertEqual(process.returncode, 5, errors)
            (line,) = [line for line in errors.splitlines() if line.startswith("tandem: error:")]
            self.assertIn(f"rank {1 - rank} at {addresses[1 - rank]}", line)
            self.assertIn(why, line)
        self.assertLess(time.monotonic() - began, seconds)


@unittest.skipIf(REFUSAL, f"this machine gives no network of its own: {REFUSAL}")
class TwoMachines(NetworkTest):
    def machines(self, out, *flags, **more):
        places = [self.place(rank, cable.ADDRESSES[0], PORT) for rank in range(2)]
        machines = cable.TwoMachines([self.command(out, *flags, **more)] * 2, places, seed=1)
        self.addCleanup(machines.end)
        return machines

    def begun(self, out):
        machines = self.machines(out, "--checkpoint-every", "1", steps=1_000_000)
        wait_for(lambda: list(out.glob("checkpoints/step-*")) or any(p.poll() is not None for p in machines.processes))
        return machines

    def test_packets_that_lag_overtake_and_are_lost(self):
        out = self.root / "out"
        machines = self.machines(out, "--policy", "interleave:2")
        self.expect_digest(machines.processes, out)
        self.assertGreater(machines.cable.carried, 1000)
        self.assertGreater(machines.cable.dropped, 2)

    def test_a_network_that_ends_connections(self):
        machines = self.begun(self.root / "out")
        machines.cable.cut("reset")
        self.expect_named(machines.processes, cable.ADDRESSES, 5.0, "is lost: its connection ended")

    def test_a_cable_that_is_pulled(self):
        machines = self.begun(self.root / "out")
        machines.cable.cut("silence")
        self.expect_named(machines.processes, cable.ADDRESSES, 15.0, "is lost: no sign of life for 10 s")


class SmallPieces(NetworkTest):
    """The rendezvous alone is cut into pieces; bytes of Gloo go by connections of their own."""

    def ranks(self, out, *flags, **more):
        port = free_port()
        relay = InPieces(port, seed=2)
        self.addCleanup(relay.close)
        processes = []
        for rank, at in enumerate((port, relay.port)):
            process = subprocess.Popen([str(word) for word in self.command(out, *flags, **more)], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, env=self.place(rank, "127.0.0.1", at))
            for end in (process.stdout, process.stderr):
                self.addCleanup(end.close)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            processes.append(process)
        return relay, processes

    def test_change_no_bit(self):
        out = self.root / "out"
        relay, processes = self.ranks(out, "--checkpoint-every", "2")
        self.expect_digest(processes, out)
        self.assertGreater(relay.pieces, 10_000)

    def test_a_connection_that_ends_within_one(self):
        out = self.root / "out"
        relay, processes = self.ranks(out, "--checkpoint-every", "1", steps=1_000_000)
        wait_for(lambda: list(out.glob("checkpoints/step-*")) or any(p.poll() is not None for p in processes))
        relay.cut()
        self.expect_named(processes, ("127.0.0.1", "127.0.0.1"), 5.0, "is lost: its connection ended")


if __name__ == "__main__":
    main()
