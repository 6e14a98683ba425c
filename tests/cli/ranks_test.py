"""One process trains on several devices to the bits of one: whatever their number, before and after a checkpoint."""
import itertools
import json
import resource
import signal
import struct
import subprocess

from program import PROFILES, PROGRAM, ProgramTest, main, wait_for

SHAPE = ["--threads", "1", "--update-threads", "1", "--seq-len", "16", "--micro-batch", "2"]
WORK = [*SHAPE, "--grad-accum", "6"]
COMPARED = ("step", "loss", "grad_norm", "lr", "skipped", "eval_loss")


def devices(ranks):
    return ["--device", ",".join(["host"] * ranks)]


class RanksTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.counter = itertools.count()

    def command(self, ranks, *flags, model="tiny-gpt2", lr="1e-3"):
        return ["train", "--model", model, "--data", self.text, *devices(ranks), *WORK, "--lr", lr, *flags]

    def train_on(self, ranks, *flags, **more):
        """Returns the folder of the run."""
        out = self.root / f"run{next(self.counter)}"
        self.succeed(self.run_program(*self.command(ranks, *flags, **more), "--out", out))
        self.assertEqual(self.summary(out)["ranks"], ranks)
        return out

    def course(self, out):
        """Whatever must not depend on the number of devices: every step, and where they lead."""
        summary = self.summary(out)
        steps = [[step.get(key) for key in COMPARED] for step in self.metrics(out)]
        return steps, [summary[key] for key in ("state_digest", "final_loss", "eval_loss", "tokens", "skipped_steps",
                                                "compute_key", "parameters")]

    def plan(self, ranks, *flags, model="tiny-gpt2"):
        return json.loads(self.succeed(self.run_program("plan", "--model", model, *devices(ranks), *WORK, *flags,
                                                        "--json")).stdout)

    def no_room_for_a_copy(self, ranks, *flags):
        """The ceiling under which there is room for everything but the copy of the state."""
        saving = ["--checkpoint-every", "1", *flags]
        plan = self.plan(ranks, *saving)
        self.assertTrue(plan["saving"]["copies_state"])
        ceiling = ["--host-memory", str(plan["host_bytes"] - (10 << 20))]
        self.assertFalse(self.plan(ranks, *saving, *ceiling)["saving"]["copies_state"])
        return ceiling


class OneCourse(RanksTest):
    def check(self, flags, ways, ranks=(2, 3), **more):
        """Returns the folders of the runs on one device and on others, in each of the ways."""
        one = self.train_on(1, "--steps", "3", *flags, **more)
        expected = self.course(one)
        folders = [one]
        for way, count in itertools.product(ways, ranks):
            with self.subTest(flags=flags, way=way, ranks=count, **more):
                folders.append(self.train_on(count, "--steps", "3", *flags, *way, **more))
                self.assertEqual(self.course(folders[-1]), expected)
        return folders

    def test_whatever_the_policy(self):
        folders = self.check([], [["--policy", "device"], ["--policy", "host", "--subgroup-size", "4097"],
                                  ["--policy", "stream", "--resident-layers", "0"],
                                  ["--policy", "interleave:2,resident=0.4", "--update-threads", "2"]])
        counted = [sum(self.summary(out)["updated_parameters"].values()) for out in folders]
        self.assertEqual(set(counted), {3 * self.summary(folders[0])["parameters"]})
        for out in folders:
            summary = self.summary(out)
            self.assertEqual(summary["bytes"]["peers"] > 0, summary["ranks"] > 1)
            self.assertEqual(summary["device"].count("host"), summary["ranks"])
            self.assertEqual(summary["peak_device_bytes"], summary["planned_device_bytes"])
            self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])
            self.assertEqual(summary["micro_batches"]["count"], 6)

    def test_gradients_so_unlike_that_the_order_of_their_sum_shows(self):
        self.check([], [["--policy", "interleave:2"]], lr="1")
        self.assertGreater(max(step["grad_norm"] for step in self.metrics(self.root / "run0")), 10.0)

    def test_whatever_the_state(self):
        for state, policy in [("split", "interleave:2"), ("bf16-moments", "host"), ("8bit-moments", "stream"),
                              ("lion", "interleave:3")]:
            self.check(["--state", state], [["--policy", policy]])

    def test_whatever_is_kept_and_in_every_order(self):
        self.check([], [["--recompute", "block", "--offload-activations"],
                        ["--accumulation-order", "layer", "--policy", "host", "--resident-layers", "0"]])

    def test_updates_in_backward_and_frozen_parameters(self):
        self.check(["--clip", "0", "--on-nonfinite", "stop"], [["--policy", "interleave:2"]])
        self.check(["--freeze", r"wpe|h\.1\."], [["--policy", "stream"]])

    def test_experts_and_embeddings_that_are_not_tied(self):
        self.check([], [["--policy", "interleave:2"]], model="tiny-moe")
        self.check([], [["--policy", "host"]], model="tiny-llama", ranks=[2])

    def test_state_in_files(self):
        disk = self.root / "disk"
        disk.mkdir()
        host = ["--policy", "host", "--subgroup-size", "16Ki"]
        expected = self.course(self.train_on(1, "--steps", "3"))
        for ranks in (2, 3):
            plan = self.plan(ranks, *host)
            state = sum(e["bytes"] for e in plan["entries"] if e["name"] == "optimizer" and e["where"] != "device")
            ceiling = ["--host-memory", plan["host_bytes"] - state // 2]
            out = self.root / f"in-files{ranks}"
            shown = self.succeed(self.run_program(*self.command(ranks, "--steps", "3", *host, "--state-dir", disk, *ceiling),
                                                  "--out", out)).stdout
            self.assertEqual(self.course(out), expected)
            summary = self.summary(out)
            self.assertGreater(summary["planned_file_bytes"], state // 4)
            self.assertEqual(summary["bytes"]["file_read"], 3 * summary["planned_file_bytes"])
            self.assertIn(f"{summary['planned_file_bytes'] / 2**20:.1f} MiB in {disk}, read and written", shown)
            self.assertEqual(summary["bytes"]["file_write"], summary["bytes"]["file_read"])
            self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])
            self.assertEqual(list(disk.iterdir()), [])

    def test_windows_that_are_evaluated(self):
        # 125 windows, two a pass and device: the last one is alone in its pass, where there are two devices.
        for folder in self.check(["--eval-data", self.held_out(), "--eval-every", "2"], [["--policy", "interleave:2"]]):
            self.assertEqual([step.get("eval_loss") is not None for step in self.metrics(folder)], [False, True, True])

    def test_steps_that_are_skipped(self):
        # Rows without a target; where all of a step are, there is nothing to learn from.
        length, rows = 17, 40
        values = [i * i % 251 for i in range(rows * length)]
        data = self.file("rows.bin", struct.pack(f"<{len(values)}H", *values))
        self.file("rows.mask.bin", bytes(row % 8 == 0 for row in range(rows) for _ in range(length)))
        self.file("rows.json", '{"layout": "rows", "row_length": 17, "dtype": "uint16", "vocab_size": 256}')
        folders = []
        for ranks in (1, 2):
            out = self.root / f"skipping{ranks}"
            self.succeed(self.run_program("train", "--model", "tiny-gpt2", "--data", data, *devices(ranks), *SHAPE[:-1], "1",
                                          "--grad-accum", "2", "--steps", "8", "--out", out))
            folders.append(out)
        self.assertEqual(self.course(folders[0]), self.course(folders[1]))
        self.assertEqual({step["skipped"] for step in self.metrics(folders[1])}, {False, True})

    def test_a_norm_that_is_not_finite(self):
        for ranks in (1, 2):
            run = self.command(ranks, "--lr-schedule", "constant", lr="1e30")
            out = self.root / f"skipped{ranks}"
            self.succeed(self.run_program(*run, "--steps", "3", "--out", out))
            self.assertEqual(self.summary(out)["skipped_steps"], 2)
            out = self.root / f"stopped{ranks}"
            self.refused(self.run_program(*run, "--steps", "3", "--on-nonfinite", "stop", "--out", out), 6,
                         "update 2: the gradient norm is not finite")
            self.assertEqual(self.checkpoints(out), ["step-00000001"])
        self.assertEqual(self.course(self.root / "skipped1"), self.course(self.root / "skipped2"))
        digests = {self.succeed(self.run_program("digest", self.root / name)).stdout
                   for name in ("stopped1", "stopped2", "skipped1", "skipped2")}
        self.assertEqual(len(digests), 1)

    def test_what_a_run_leaves(self):
        trace = self.root / "trace.json"
        out = self.root / "run"
        shown = self.succeed(self.run_program(*self.command(2, "--steps", "2", "--trace", trace), "--out", out)).stdout
        self.assertRegex(shown, "ranks .*2 devices, each as above; host memory of all")
        events = json.loads(trace.read_text())
        events = events["traceEvents"] if isinstance(events, dict) else events
        self.assertIn("step 2", {event.get("name") for event in events})
        self.assertEqual([step["step"] for step in self.metrics(out)], [1, 2])
        self.assertIn('"host,host"', (out / "config.toml").read_text())
        # The files of a run on several devices are those of any other.
        self.succeed(self.run_program("eval", "--model", out, "--data", self.held_out(), "--device", "host", "--seq-len", "16"))
        self.succeed(self.run_program("train", "--resume", "--out", out, "--steps", "3"))
        self.assertEqual(self.summary(out)["ranks"], 2)


class Checkpoints(RanksTest):
    def test_resumed_on_another_number_of_devices(self):
        flags = ["--steps", "4", "--policy", "interleave:2", "--checkpoint-every", "2", "--keep", "0"]
        expected, states = None, set()
        for before, beside, behind in [(1, False, [2]), (2, False, [1, 3]), (2, True, [3]), (3, True, [2])]:
            ceiling = self.no_room_for_a_copy(before, "--policy", "interleave:2") if beside else []
            first = self.train_on(before, *flags, *ceiling)
            second = first / "checkpoints" / "step-00000002"
            states.add((second / "state.safetensors").read_bytes())
            expected = expected or self.course(first)
            self.assertEqual(self.course(first), expected)
            self.assertLessEqual(self.summary(first)["peak_host_bytes"], self.summary(first)["planned_host_bytes"])
            for ranks in behind:
                with self.subTest(before=before, beside=beside, behind=ranks):
                    out = self.root / f"resumed{next(self.counter)}"
                    run = self.command(ranks, "--steps", "4", "--policy", "host", "--resume", second, "--strict")
                    self.succeed(self.run_program(*run, "--out", out))
                    steps, end = self.course(out)
                    self.assertEqual((self.summary(out)["resumed_from_step"], steps, end), (2, expected[0][2:], expected[1]))
        self.assertEqual(len(states), 1)

    def test_a_signal_saves_and_ends(self):
        for ranks, number in [(2, signal.SIGTERM), (3, signal.SIGINT)]:
            out = self.root / f"run{ranks}"
            run = self.command(ranks, "--steps", "1000000", "--checkpoint-every", "1")
            process = subprocess.Popen([PROGRAM, *map(str, run), "--out", str(out), "--quiet"], stderr=subprocess.DEVNULL)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            wait_for(lambda: list(out.glob("checkpoints/step-*")))
            process.send_signal(number)
            self.assertEqual(process.wait(timeout=60), 128 + number)
            summary = self.summary(out)
            self.assertEqual(self.checkpoints(out)[-1], f"step-{summary['steps']:08}")
            self.assertEqual(self.succeed(self.run_program("digest", out)).stdout.strip(), summary["state_digest"])

    def test_a_disk_without_room_ends_all_and_leaves_the_checkpoint_before(self):
        out = self.train_on(2, "--steps", "2")
        kept = out / "checkpoints" / "step-00000002"
        before = (kept / "state.safetensors").read_bytes()

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for ceiling in [[], self.no_room_for_a_copy(2)]:
            run = self.command(2, "--steps", "6", "--checkpoint-every", "2", "--resume", *ceiling)
            full = subprocess.run([PROGRAM, *map(str, run), "--out", str(out)], capture_output=True, text=True, timeout=60,
                                  preexec_fn=limit)
            self.refused(full, 7, "step-00000004")
            self.assertEqual(self.checkpoints(out), ["step-00000002"])
            self.assertEqual((kept / "state.safetensors").read_bytes(), before)
        going_on = subprocess.run([PROGRAM, *map(str, run), "--out", str(out), "--on-save-failure", "continue"],
                                  capture_output=True, text=True, timeout=60, preexec_fn=limit)
        self.refused(going_on, 7, "step-00000006")
        self.assertIn("checkpoint of step 4 failed, the run goes on", going_on.stderr)
        self.assertEqual(self.checkpoints(out), ["step-00000002"])


class Refused(RanksTest):
    def refuse(self, code, words, device, *flags, grad_accum="2"):
        out = self.root / "out"
        self.refused(self.run_program("train", "--model", "tiny-gpt2", "--data", self.text, "--device", device, *SHAPE,
                                      "--grad-accum", grad_accum, "--steps", "2", "--out", out, *flags), code, *words)
        self.assertFalse(out.exists(), "a refused run left files")

    def test_lists_of_devices(self):
        for device in ["host,cuda:0", "cuda:0,host", "auto,auto", "cuda,cuda", "host,auto"]:
            self.refuse(2, [f"devices '{device}'", "cuda:0,cuda:1"], device)
        for device in ["host,", ",host", "host,,host"]:
            self.refuse(2, ["device ''"], device)
        self.refuse(2, ["device 'gpu'"], "host,gpu")
        self.refuse(2, ["--grad-accum 3", "use a multiple of 2"], "host,host", grad_accum="3")
        self.refuse(2, ["--grad-accum 1", "use a multiple of 2"], "host,host", grad_accum="1")
        if subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout.find("libcuda.so.1") < 0:
            self.refuse(5, ["cuda:0"], "cuda:0,cuda:1")

    def test_what_takes_one_device(self):
        out = self.train_on(1, "--steps", "1")
        for command in [("eval", "--model", out, "--data", self.text), ("sample", "--model", out, "--prompt", "The"),
                        ("bench", "--model", "tiny-gpt2", *SHAPE), ("calibrate",)]:
            self.refused(self.run_program(*command, "--device", "host,host"), 2, "devices 'host,host'", "takes one")

    def test_too_little_memory_and_the_advice_that_does(self):
        for flag, little in [("--host-memory", "8MiB"), ("--device-memory", "1MiB")]:
            run = self.command(2, "--policy", "host", "--steps", "1", "--checkpoint-every", "1")
            line = self.refused(self.run_program(*run, flag, little), 3, "does not fit")
            (advised,) = [words for words in self.flags_in(line) if words.startswith(flag)]
            out = self.root / flag[2:]
            self.succeed(self.run_program(*run, *advised.split(), "--out", out))
            summary = self.summary(out)
            self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])
            self.assertEqual(summary["peak_device_bytes"], summary["planned_device_bytes"])


class Plans(RanksTest):
    def test_here(self):
        one, two = self.plan(1, "--policy", "host"), self.plan(2, "--policy", "host")
        optimizer = [sum(e["bytes"] for e in plan["entries"] if e["name"] == "optimizer") for plan in (one, two)]
        self.assertGreater(optimizer[0], 0)
        self.assertAlmostEqual(optimizer[1], optimizer[0], delta=optimizer[0] / 50)  # divided, and given for all
        saving = [self.plan(ranks, "--checkpoint-every", "1")["entries"] for ranks in (1, 2, 3)]
        copies = [sum(e["bytes"] for e in entries if e["name"] == "checkpoint copy") for entries in saving]
        self.assertGreater(copies[0], 0)
        for copy in copies:
            self.assertAlmostEqual(copy, copies[0], delta=4096)
        shown = self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *devices(2), *WORK)).stdout
        self.assertIn("2 devices, each as above; host memory of all", shown)
        self.refused(self.run_program("plan", "--model", "tiny-gpt2", *devices(2), *SHAPE, "--grad-accum", "3"), 2,
                     "use a multiple of 2")

    def test_of_another_machine(self):
        def planned(device, *flags):
            return json.loads(self.succeed(self.run_program(
                "plan", "--profile", PROFILES / "24gb-pcie4.toml", "--device", device, "--model", "llama3.2-1b", *flags,
                "--json")).stdout)
        held = ["--policy", "host", "--recompute", "block", "--seq-len", "1024", "--grad-accum", "8", "--accumulation-order",
                "layer"]
        one, two = planned("cuda:0", *held), planned("cuda:0,cuda:1", *held)
        self.assertLess(abs(two["host_bytes"] / one["host_bytes"] - 1.0), 0.05)  # state is divided
        for work, gain in [(held, 1.2), (["--seq-len", "256", "--grad-accum", "2", "--recompute", "none"], 1.0)]:
            one, two = planned("cuda:0", *work), planned("cuda:0,cuda:1", *work)
            self.assertLessEqual(two["device_bytes"], one["device_bytes"])
            self.assertLessEqual(two["host_bytes"], 1.05 * one["host_bytes"])
            faster = two["predicted"]["tokens_per_second"] / one["predicted"]["tokens_per_second"]
            self.assertGreater(faster, gain)
            self.assertLess(faster, 2.0)
            self.assertEqual(two["micro_batches"]["count"], one["micro_batches"]["count"])


if __name__ == "__main__":
    main()
