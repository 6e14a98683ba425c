"""Calls that block let other threads run, and Ctrl-C ends those that can be ended."""
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import toy
from toy import np, tandem


class Beside(threading.Thread):
    """Counts while another thread blocks."""

    def __init__(self):
        super().__init__(daemon=True)
        self.count, self.ends = 0, False

    def run(self):
        while not self.ends:
            self.count += 1
            time.sleep(0.001)

    def during(self, call):
        """How far it counts during a call, and the seconds of that."""
        before, began = self.count, time.monotonic()
        call()
        return self.count - before, time.monotonic() - began


class Lock(unittest.TestCase):
    def setUp(self):
        self.beside = Beside()
        self.beside.start()
        self.addCleanup(setattr, self.beside, "ends", True)

    def assert_runs_beside(self, call, at_least=0.05):
        count, seconds = self.beside.during(call)
        self.assertGreater(seconds, at_least, "too short to tell")
        self.assertGreater(count, 10 * seconds)

    def slow(self, elements, policy="host", **options):
        device = tandem.open_device("host", memory="256MiB", threads=1, update_threads=1, **options)
        layout = tandem.ParameterLayout()
        layout.add_layer("a").add("w", elements)
        layout.add_layer("b").add("w", elements)
        chosen = tandem.OffloadOptions(policy=policy, resident_layers=0 if policy == "host" else None)
        engine = tandem.OffloadEngine(device, layout, chosen, tandem.make_plan(layout, chosen, device))
        zero = np.zeros(elements, np.float32)
        engine.initialize(lambda parameter: zero)
        return engine, device.make_stream()

    def test_end_step_waits_without_the_lock(self):
        engine, stream = self.slow(1 << 19, link_bytes_per_second=4e6)
        engine.begin_step()
        for i in (1, 0):
            with engine.gradients(i, stream):
                pass
        self.assert_runs_beside(engine.end_step)

    def test_synchronize_and_views_wait_without_the_lock(self):
        engine, stream = self.slow(1 << 19, link_bytes_per_second=4e6)
        with engine.evaluation():
            with engine.fetch(0, stream) as weights:
                self.assert_runs_beside(weights["w"].copy)
            with engine.fetch(1, stream):
                self.assert_runs_beside(stream.synchronize)

    def test_digest_read_and_closing_run_without_the_lock(self):
        engine, _ = self.slow(1 << 19, policy="device", link_bytes_per_second=30e6)
        self.assert_runs_beside(engine.state_digest)
        self.assert_runs_beside(lambda: engine.read("a.w"))

    def test_letting_go_of_a_stream_waits_for_its_functions_without_the_lock(self):
        stream = tandem.open_device("host", memory="32MiB", threads=1).make_stream()
        seen = []
        stream.enqueue("sleep", lambda: (time.sleep(0.2), seen.append(1)))
        holder = [stream]
        del stream
        self.assert_runs_beside(holder.clear)
        self.assertEqual(seen, [1])

    def test_calls_of_two_threads_take_turns(self):
        engine, _ = self.slow(1 << 20)
        digests = []
        threads = [threading.Thread(target=lambda: digests.append(engine.state_digest())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(set(digests)), 1)
        self.assertEqual(len(digests), 4)


class Interrupts(unittest.TestCase):
    def interrupted(self, call, after=0.2):
        """Seconds until Ctrl-C has ended a call."""
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            call()
        timer.join()
        return time.monotonic() - began - after

    def test_synchronize_ends(self):
        stream = tandem.open_device("host", memory="32MiB", threads=1).make_stream()
        goes_on = threading.Event()
        stream.enqueue("wait", lambda: goes_on.wait(60))
        self.assertLess(self.interrupted(stream.synchronize), 2)
        goes_on.set()
        stream.synchronize()

    def test_waiting_for_a_view_ends(self):
        trainer = toy.Toy()
        goes_on = threading.Event()
        with trainer.engine.evaluation():
            trainer.stream.enqueue("wait", lambda: goes_on.wait(60))
            with trainer.engine.fetch(0, trainer.stream) as weights:
                self.assertLess(self.interrupted(weights["w1"].copy), 2)
                goes_on.set()
                weights["w1"].copy()

    def test_initialize_ends_between_parameters(self):
        """Parameters given as arrays: a function would hear of the signal itself."""
        device = tandem.open_device("host", memory="512MiB", threads=1, update_threads=1)
        layout = tandem.ParameterLayout()
        for i in range(16):
            layout.add_layer(f"h.{i}").add("w", 1 << 21)
        options = tandem.OffloadOptions(policy="host")
        engine = tandem.OffloadEngine(device, layout, options, tandem.make_plan(layout, options, device))
        one = np.ones(1 << 21, np.float32)
        values = {p.full_name: one for p in layout.owned_parameters}
        self.assertLess(self.interrupted(lambda: engine.initialize(values), after=0.01), 2)
        with self.assertRaises(tandem.TrainingError):
            engine.state_digest()
        engine.initialize(values)
        engine.state_digest()

    def test_calibrate_ends_between_figures(self):
        device = tandem.open_device("host", memory="300MiB", threads=1, update_threads=1)
        self.assertLess(self.interrupted(lambda: tandem.calibrate(device, seconds_per_figure=0.2), after=1), 5)
        self.assertEqual(device.allocated_bytes, 0)

    def test_an_interpreter_ends_after_its_queued_functions(self):
        script = ("import sys, time; sys.path.insert(0, sys.argv[1]); import tandem\n"
                  "s = tandem.open_device('host', memory='32MiB', threads=1).make_stream()\n"
                  "s.enqueue('late', lambda: (time.sleep(0.5), print('done', flush=True)))\n"
                  "import builtins; builtins.kept = s\n")
        done = subprocess.run([sys.executable, "-c", script, str(toy.PACKAGE)], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "done\n", ""))


if __name__ == "__main__":
    unittest.main()
