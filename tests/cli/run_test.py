"""Small runs of the built program, from training to sampling."""
import json
import os
import pathlib
import resource
import shutil
import signal
import struct
import subprocess
import time

from program import PROGRAM, SMALL, ProgramTest, main

SUMMARY_KEYS = {"model", "parameters", "lora", "base_format",
                "device", "ranks", "processes", "policy", "steps", "ended_by", "tokens", "first_loss", "final_loss", "eval_loss",
                "tokens_per_second", "step_seconds", "phase_seconds", "planned_device_bytes", "peak_device_bytes", "micro_batches",
                "planned_host_bytes", "peak_host_bytes", "planned_file_bytes", "updated_parameters", "bytes", "skipped_steps",
                "speculated_parameters", "confirmed_steps", "rolled_back_steps",
                "resumed_from_step", "state_digest", "compute_key", "version", "command"}
METRIC_KEYS = {"step", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_second", "bound_by", "device_bytes",
               "skipped", "exposed_update_seconds", "h2d_bytes", "d2h_bytes", "h2d_bytes_per_second",
               "d2h_bytes_per_second", "file_read_bytes", "file_write_bytes", "dram_bytes_per_second", "speculated_parameters",
               "speculation"}
BOUNDS = {"compute", "host to device", "device to host", "CPU", "DRAM"}


class Training(ProgramTest):
    def test_loss_falls_and_the_files_are_complete(self):
        out = self.root / "run"
        result = self.succeed(self.train("--steps", "30", "--lr", "2e-3", "--eval-data", self.held_out(), "--out", out,
                                         "--trace", self.root / "trace.json"))
        summary = self.summary(out)
        self.assertEqual(set(summary), SUMMARY_KEYS)
        self.assertEqual(set(summary["phase_seconds"]), {"forward", "backward", "update", "exposed_update"})
        self.assertGreater(summary["phase_seconds"]["forward"], 0.0)
        self.assertGreater(summary["phase_seconds"]["backward"], 0.0)
        self.assertLess(summary["final_loss"], 0.75 * summary["first_loss"])
        self.assertEqual(summary["tokens"], 30 * 2 * 32)
        self.assertEqual(summary["planned_device_bytes"], summary["peak_device_bytes"])
        self.assertIn(summary["state_digest"], result.stdout)
        metrics = self.metrics(out)
        self.assertEqual([m["step"] for m in metrics], list(range(1, 31)))
        for line in metrics:
            self.assertLessEqual(METRIC_KEYS, set(line))
            self.assertIn(line["bound_by"], BOUNDS)
        self.assertEqual(metrics[-1]["eval_loss"], summary["eval_loss"])
        self.assertEqual(len(result.stdout.splitlines()), len([l for l in result.stdout.splitlines() if "\r" not in l]))
        self.assertTrue(json.loads((self.root / "trace.json").read_text())["traceEvents"])
        digest = json.loads(self.succeed(self.run_program("digest", out, "--json")).stdout)
        self.assertEqual(digest["state_digest"], summary["state_digest"])
        evaluation = self.succeed(self.run_program("eval", "--model", out, "--data", self.held_out(), *SMALL[:4], *SMALL[6:],
                                                   "--json"))
        values = json.loads(evaluation.stdout)
        self.assertEqual(set(values), {"loss", "tokens", "windows"})
        self.assertEqual(values["loss"], summary["eval_loss"])
        self.assertEqual(values["tokens"], values["windows"] * 32)

    def test_same_command_same_bits_and_another_seed_other_bits(self):
        digests = []
        for name, seed in [("a", "1"), ("b", "1"), ("c", "2")]:
            self.succeed(self.train("--steps", "2", "--seed", seed, "--out", self.root / name))
            digests.append(self.summary(self.root / name)["state_digest"])
        self.assertEqual(digests[0], digests[1])
        self.assertNotEqual(digests[0], digests[2])

    def test_policies_give_the_same_bits(self):
        digests = set()
        for i, flags in enumerate([["--policy", "device"], ["--policy", "host", "--subgroup-size", "4097"],
                                   ["--policy", "static:0.5"], ["--policy", "interleave:3,resident=0.2"],
                                   ["--policy", "stream", "--resident-layers", "0", "--recompute", "block"],
                                   ["--policy", "host", "--device-memory", "24MiB"]]):
            out = self.root / str(i)
            self.succeed(self.train("--steps", "3", "--grad-accum", "3", *flags, "--out", out))
            summary = self.summary(out)
            digests.add(summary["state_digest"])
            self.assertEqual(sum(summary["updated_parameters"].values()), 3 * summary["parameters"])
        self.assertEqual(len(digests), 1)

    def test_updates_ahead_of_the_norm_are_told(self):
        """Updates run ahead by default once most steps were confirmed; each step says what became of them."""
        digests = set()

        def outcomes(speculate, *flags):
            out = self.root / f"{speculate}{len(flags)}"
            self.succeed(self.train("--steps", "9", "--policy", "host", *flags, "--out", out))
            steps, summary = self.metrics(out), self.summary(out)
            for step in steps:
                self.assertTrue(step["speculation"] or step["speculated_parameters"] == 0, step)
            told = [step["speculation"] for step in steps]
            self.assertEqual((told.count("confirmed"), told.count("rolled_back")),
                             (summary["confirmed_steps"], summary["rolled_back_steps"]))
            self.assertLessEqual(sum(step["speculated_parameters"] for step in steps), summary["speculated_parameters"])
            digests.add((summary["state_digest"], *flags[:2]))
            return told, [step["grad_norm"] for step in steps]
        unclipped = ["--clip", "1e9"]
        self.assertEqual(outcomes("auto", *unclipped)[0], [None] * 6 + ["confirmed"] * 3)
        waiting, norms = outcomes("off", *unclipped, "--speculate", "off")
        self.assertEqual(waiting, [None] * 9)
        self.assertEqual(len(digests), 1)
        clip = ["--clip", str(sorted(norms)[4])]
        told, norms = outcomes("on", *clip, "--speculate", "on")
        self.assertEqual(told, ["rolled_back" if norm > float(clip[1]) else "confirmed" for norm in norms])
        self.assertEqual(set(told), {"rolled_back", "confirmed"})
        page = self.root / "report.html"
        self.succeed(self.run_program("report", self.root / "on4", "--out", page))
        self.assertIn("steps whose updates ran before the norm, taken back", page.read_text())

    def test_config_file_reproduces_the_run(self):
        first, second = self.root / "a", self.root / "b"
        self.succeed(self.train("--epochs", "0.02", "--policy", "static:0.25", "--out", first))
        self.succeed(self.run_program("train", "--config", first / "config.toml", "--out", second))
        self.assertEqual(self.summary(first)["state_digest"], self.summary(second)["state_digest"])
        self.assertEqual((first / "config.toml").read_text().replace(str(first), ""),
                         (second / "config.toml").read_text().replace(str(second), ""))

    def test_frozen_parameters_stay(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--freeze", r"wte|\.mlp\.", "--out", out))
        summary = self.summary(out)
        self.assertLess(sum(summary["updated_parameters"].values()), summary["parameters"])
        digest = self.succeed(self.run_program("digest", out)).stdout.strip()
        self.assertEqual(digest, summary["state_digest"])

    def test_biases_alone_are_trained(self):
        """The bias of a linear layer whose weight is frozen has a gradient of its own."""
        model = self.file("model/config.json", json.dumps(
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_embd": 36, "n_inner": 53,
             "n_layer": 2, "n_head": 3, "n_positions": 48, "n_ctx": 48}))
        out = self.root / "run"
        self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "4", "--lr", "1e-2",
                                      "--freeze", "weight$", "--out", out))
        biases = 2 * (36 + 3 * 36 + 36 + 36 + 53 + 36) + 36
        self.assertEqual(sum(self.summary(out)["updated_parameters"].values()), 4 * biases)
        curve = [m["loss"] for m in self.metrics(out)]
        self.assertLess(curve[-1], curve[0])

    def test_lists_of_subgroups_are_in_the_plan(self):
        """Memory that many small subgroups take more than a few large ones is no more than the plan says."""
        model = self.file("model/config.json", json.dumps(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16384, "hidden_size": 256,
             "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 64}))
        memory = []
        for size in ("1Mi", "1024"):
            out = self.root / size
            self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "3",
                                          "--policy", "stream", "--subgroup-size", size, "--out", out))
            summary = self.summary(out)
            self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])
            memory.append((summary["planned_host_bytes"], summary["peak_host_bytes"]))
        planned, peak = (many - few for few, many in zip(*memory))
        self.assertGreater(peak, 5 << 20)
        self.assertLessEqual(peak, planned)

    def test_a_layer_that_is_frozen_whole(self):
        """The first layer of an untied model is its embedding and nothing else."""
        model = self.file("model/config.json", json.dumps(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 36,
             "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
             "max_position_embeddings": 48, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}))
        digests, losses = set(), set()
        for i, flags in enumerate([["--policy", "device"], ["--policy", "host", "--subgroup-size", "4097"],
                                   ["--policy", "stream", "--resident-layers", "0", "--recompute", "block"]]):
            out = self.root / f"run{i}"
            self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--freeze", "embed_tokens",
                                          "--steps", "4", "--lr", "1e-3", "--grad-accum", "2", *flags, "--out", out))
            summary = self.summary(out)
            digests.add(summary["state_digest"])
            losses.add(tuple(m["loss"] for m in self.metrics(out)))
            self.assertEqual(sum(summary["updated_parameters"].values()), 4 * (summary["parameters"] - 256 * 36))
        self.assertEqual((len(digests), len(losses)), (1, 1))
        curve = losses.pop()
        self.assertLess(curve[-1], curve[0])
        free = self.root / "free"
        self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "4", "--lr", "1e-3",
                                      "--grad-accum", "2", "--out", free))
        self.assertNotIn(self.summary(free)["state_digest"], digests)
        # Frozen weights go out as they came in: as they were before the first step, which is that of any other run.
        before, after = (self.embedding(run) for run in (self.started(model), out))
        self.assertEqual(before, after)
        self.assertNotEqual(before, self.embedding(free))

    def started(self, model):
        """A run that has not learnt anything: its rate is zero."""
        out = self.root / "started"
        self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "1", "--lr", "0",
                                      "--weight-decay", "0", "--out", out))
        return out

    def embedding(self, run):
        to = self.root / f"{run.name}-model"
        self.succeed(self.run_program("export", run, "--to", to, "--dtype", "bf16"))
        whole = (to / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        begin, end = json.loads(whole[8:8 + length])["model.embed_tokens.weight"]["data_offsets"]
        return whole[8 + length + begin:8 + length + end]

    def test_dry_run_writes_nothing(self):
        out = self.root / "run"
        result = self.succeed(self.train("--steps", "1", "--out", out, "--dry-run"))
        self.assertIn("total", result.stdout)
        self.assertFalse(out.exists())


class Resuming(ProgramTest):
    def test_resumed_run_equals_the_straight_one(self):
        straight, broken = self.root / "straight", self.root / "broken"
        flags = ["--eval-data", self.held_out(), "--eval-every", "2", "--lr", "1e-3"]
        self.succeed(self.train("--steps", "7", *flags, "--out", straight))
        self.succeed(self.train("--steps", "4", "--decay-steps", "7", *flags, "--out", broken))
        (broken / "metrics.jsonl").write_text((broken / "metrics.jsonl").read_text() + '{"step": 5, "loss": 9}\n{"st')
        self.succeed(self.run_program("train", "--resume", "--out", broken, "--steps", "7", "--policy", "host",
                                      "--subgroup-size", "5000"))
        one, two = self.summary(straight), self.summary(broken)
        self.assertEqual(one["state_digest"], two["state_digest"])
        self.assertEqual(two["resumed_from_step"], 4)
        self.assertIsNone(one["resumed_from_step"])
        for key in ["first_loss", "final_loss", "eval_loss", "tokens", "steps"]:
            self.assertEqual(one[key], two[key], key)
        for a, b in zip(self.metrics(straight), self.metrics(broken), strict=True):
            self.assertEqual((a["step"], a["loss"], a["grad_norm"], a["lr"]), (b["step"], b["loss"], b["grad_norm"], b["lr"]))

    def test_a_switch_of_the_run_can_be_taken_back(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", "--eval-data", self.held_out(), "--keep-best", "--strict", "--out", out))
        self.assertIn("keep-best = true", (out / "config.toml").read_text())
        self.succeed(self.run_program("train", "--resume", "--out", out, "--steps", "3", "--no-keep-best", "--decay-steps", "2"))
        config = (out / "config.toml").read_text()
        self.assertNotIn("keep-best = true", config)
        self.assertIn("strict = true", config)
        typed = self.root / "typed.toml"
        typed.write_text("strict = true\n")
        again = self.root / "again"
        self.succeed(self.train("--steps", "1", "--config", typed, "--no-strict", "--out", again))
        self.assertNotIn("strict = true", (again / "config.toml").read_text())

    def test_fewer_steps_than_were_taken_take_none_and_say_so(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "4", "--out", out))
        before = self.summary(out)
        again = self.succeed(self.run_program("train", "--resume", "--out", out, "--steps", "2"))
        self.assertIn("--steps 2: the run has 4 already", again.stderr)
        self.assertNotIn("schedule", again.stderr)
        self.assertEqual(self.summary(out)["state_digest"], before["state_digest"])

    def test_resuming_a_finished_run_rewrites_the_summary(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", "--out", out))
        before = self.summary(out)
        (out / "summary.json").unlink()
        self.succeed(self.run_program("train", "--resume", "--out", out))
        after = self.summary(out)
        self.assertEqual(before["state_digest"], after["state_digest"])
        self.assertEqual(after["steps"], 2)

    def test_a_run_without_a_step_to_take_keeps_figures_and_configuration(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", "--lr", "1e-3", "--out", out))
        before, config = self.summary(out), (out / "config.toml").read_text()
        self.succeed(self.train("--steps", "2", "--lr", "7e-3", "--resume", "--out", out))
        self.assertEqual(self.summary(out), before)
        self.assertEqual((out / "config.toml").read_text(), config)
        self.succeed(self.train("--steps", "2", "--eval-data", self.held_out(), "--resume", "--out", out))
        after = self.summary(out)
        self.assertIsNotNone(after["eval_loss"])
        self.assertEqual({**after, "eval_loss": None}, before)
        # Elsewhere it writes its own.
        self.succeed(self.train("--steps", "2", "--resume", out, "--out", self.root / "other"))
        self.assertEqual(self.summary(self.root / "other")["resumed_from_step"], 2)
        self.assertTrue((self.root / "other" / "config.toml").exists())

    def test_without_a_checkpoint_it_starts_fresh_and_says_so(self):
        result = self.succeed(self.train("--steps", "1", "--out", self.root / "run", "--resume"))
        self.assertIn("starts fresh", result.stderr)

    def test_keeps_the_newest_checkpoints(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "5", "--checkpoint-every", "1", "--keep", "3", "--out", out))
        self.assertEqual(sorted(p.name for p in (out / "checkpoints").iterdir()),
                         ["step-00000003", "step-00000004", "step-00000005"])

    def test_a_damaged_newest_checkpoint_is_passed_over(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "3", "--checkpoint-every", "1", "--out", out))
        digest = self.summary(out)["state_digest"]
        with (out / "checkpoints" / "step-00000003" / "state.safetensors").open("r+b") as state:
            state.truncate(1000)
        result = self.succeed(self.run_program("train", "--resume", "--out", out))
        self.assertIn("passed over", result.stderr)
        self.assertEqual(self.summary(out)["resumed_from_step"], 2)
        self.assertEqual(self.summary(out)["state_digest"], digest)

    def flip_a_bit_of(self, checkpoint):
        with (checkpoint / "state.safetensors").open("r+b") as state:
            state.seek(-1, 2)
            last = state.read(1)[0]
            state.seek(-1, 2)
            state.write(bytes([last ^ 1]))

    def test_one_flipped_bit_is_found_while_loading_and_the_one_before_taken(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "3", "--checkpoint-every", "1", "--keep", "3", "--out", out))
        straight = self.summary(out)
        self.flip_a_bit_of(out / "checkpoints" / "step-00000003")
        self.flip_a_bit_of(out / "checkpoints" / "step-00000002")
        result = self.succeed(self.run_program("train", "--resume", "--out", out))
        self.assertEqual(result.stderr.count("passed over"), 2, result.stderr)
        self.assertIn("another content", result.stderr)
        after = self.summary(out)
        self.assertEqual(after["resumed_from_step"], 1)
        for figure in ("state_digest", "final_loss", "tokens", "steps"):
            self.assertEqual(after[figure], straight[figure], figure)
        self.assertEqual([line["step"] for line in self.metrics(out)], [1, 2, 3])

    def test_where_every_checkpoint_is_damaged_it_starts_fresh_but_not_if_strict(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", "--checkpoint-every", "1", "--out", out))
        digest = self.summary(out)["state_digest"]
        for step in (1, 2):
            self.flip_a_bit_of(out / "checkpoints" / f"step-{step:08}")
        self.refused(self.run_program("train", "--resume", "--out", out, "--strict"), 4, "no good checkpoint")
        self.refused(self.run_program("train", "--resume", out / "checkpoints" / "step-00000001", "--out", out), 4,
                     "another content")
        self.assertEqual(len(self.metrics(out)), 2, "a refused run left the figures of the one before")
        result = self.succeed(self.run_program("train", "--resume", "--out", out))
        self.assertIn("no good checkpoint", result.stderr)
        self.assertIn("starts fresh", result.stderr)
        self.assertEqual(self.summary(out)["state_digest"], digest)
        self.assertNotIn("resumed_from_step", {k: v for k, v in self.summary(out).items() if v is not None})

    def endless_run(self, out, **settings):
        """A run without an end that has trained a step."""
        process = subprocess.Popen([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL, "--steps",
                                    "1000000", "--out", str(out)], stdout=subprocess.DEVNULL, **settings)
        metrics = out / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 0):
            time.sleep(0.05)
        return process

    def has_saved_its_last_step(self, out):
        steps = self.summary(out)["steps"]
        self.assertEqual([p.name for p in (out / "checkpoints").iterdir()], [f"step-{steps:08}"])
        self.assertEqual(len(self.metrics(out)), steps)

    def test_a_signal_ends_the_step_saves_and_is_the_exit_code(self):
        for number, code in [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]:
            with self.subTest(code=code):
                out = self.root / f"run{code}"
                process = self.endless_run(out)
                process.send_signal(number)
                self.assertEqual(process.wait(timeout=120), code)
                self.has_saved_its_last_step(out)

    def test_a_hangup_that_is_ignored_ends_nothing(self):
        out = self.root / "run"
        process = self.endless_run(out, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGHUP)  # nor the end of a run, whenever it comes
        self.assertEqual(process.wait(timeout=1), 143)
        self.has_saved_its_last_step(out)

    def test_a_run_that_cannot_go_on_keeps_what_it_has(self):
        for policy in ("skip", "stop"):
            with self.subTest(policy=policy):
                out = self.root / policy
                # The first step's update is finite, and so large that no gradient after it is.
                result = self.train("--steps", "30", "--lr", "1e38", "--on-nonfinite", policy, "--out", out)
                self.refused(result, 6, "last checkpoint")
                (checkpoint,) = (out / "checkpoints").iterdir()
                step = len(self.metrics(out))
                self.assertEqual(checkpoint.name, f"step-{step:08}")
                self.assertEqual(step, 11 if policy == "skip" else 1)
                digest = self.run_program("digest", checkpoint).stdout.strip()
                self.assertTrue(digest)
                resumed = self.train("--steps", str(step), "--lr", "1e-4", "--resume", "--out", out)
                self.succeed(resumed)
                self.assertIn(self.summary(out)["state_digest"], digest)
                self.assertEqual(self.summary(out)["resumed_from_step"], step)

    def program_of_another_user(self):
        """A user to run as, and a copy of the program that this user may run wherever the tree lies."""
        self.root.chmod(0o755)
        program = shutil.copy(PROGRAM, self.root / "tandem")
        return (54321 if os.getuid() == 0 else os.getuid()), program

    def test_a_cache_that_may_not_be_read_is_no_calibration(self):
        cache = self.root / "cache"
        cache.mkdir(mode=0)
        user, program = self.program_of_another_user()
        result = subprocess.run([program, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL, "--steps", "1"],
                                capture_output=True, text=True, timeout=120, user=user,
                                env={**os.environ, "XDG_CACHE_HOME": str(cache)})
        cache.chmod(0o755)
        self.succeed(result)
        self.assertIn("not calibrated", result.stderr)

    def test_too_few_threads_are_told_and_nothing_hangs(self):
        # Limits count a user's threads: one who has no other.
        user, program = self.program_of_another_user()

        def limited(most):
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            if os.getuid() == 0:
                os.setuid(user)

        others = 0
        if os.getuid() != 0:
            others = sum(1 for p in pathlib.Path("/proc").glob("[0-9]*/task/*") if p.stat().st_uid == user)
        codes = []
        for most in range(1, 16):
            result = subprocess.run([program, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL,
                                     "--policy", "host", "--steps", "1"], capture_output=True, text=True, timeout=120,
                                    env={**os.environ, "XDG_CACHE_HOME": str(self.root)},
                                    preexec_fn=lambda most=most: limited(others + most))
            codes.append(result.returncode)
            if result.returncode != 0:
                self.refused(result, 5, "thread")
        self.assertEqual(codes[-1], 0, codes)
        self.assertIn(5, codes)

    def test_two_processes_cannot_share_a_folder(self):
        out = self.root / "run"
        process = subprocess.Popen([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL,
                                    "--steps", "1000000", "--out", str(out)], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            self.refused(self.train("--steps", "1", "--out", out, "--resume"), 7, "another process")
        finally:
            process.terminate()
            process.wait(timeout=120)


class Models(ProgramTest):
    def test_export_evaluates_alike_and_trains_on(self):
        for model in ["tiny-gpt2", "tiny-llama"]:
            with self.subTest(model=model):
                out = self.root / model
                self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "2",
                                              "--eval-data", self.held_out(), "--out", out))
                expected = self.summary(out)["eval_loss"]
                for dtype in ["bf16", "fp32"]:
                    to = self.root / f"{model}-{dtype}"
                    self.succeed(self.run_program("export", out, "--to", to, "--dtype", dtype))
                    result = self.run_program("eval", "--model", to, "--data", self.held_out(), "--seq-len", "32",
                                              "--micro-batch", "2", "--threads", "1", "--json")
                    self.assertEqual(json.loads(self.succeed(result).stdout)["loss"], expected)

    def test_sampling_is_a_function_of_the_seed(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "20", "--lr", "2e-3", "--out", out))
        sample = lambda *flags: self.succeed(self.run_program("sample", "--model", out, "--prompt", "The ",
                                                              "--max-tokens", "12", "--json", *flags)).stdout
        self.assertEqual(sample("--seed", "3"), sample("--seed", "3"))
        self.assertNotEqual(sample("--seed", "3", "--temperature", "2"), sample("--seed", "4", "--temperature", "2"))
        self.assertEqual(sample("--temperature", "0", "--seed", "3"), sample("--temperature", "0", "--seed", "4"))
        self.assertEqual(len(json.loads(sample())["tokens"]), 12)
        self.refused(self.run_program("sample", "--model", out), 2, "--prompt")
        self.refused(self.run_program("sample", "--model", "tiny-gpt2", "--prompt", "x"), 2, "no weights")

    def test_plan_as_json(self):
        result = self.succeed(self.run_program("plan", "--model", "tiny-llama", "--policy", "static:0.5", "--json"))
        plan = json.loads(result.stdout)
        self.assertLessEqual({"fits", "device_bytes", "host_bytes", "entries", "policy", "shares", "predicted", "bound_by",
                              "advice"}, set(plan))
        self.assertTrue(plan["fits"])
        self.assertEqual(plan["device_bytes"], sum(e["bytes"] for e in plan["entries"] if e["where"] == "device"))
        self.assertAlmostEqual(plan["shares"]["cpu"], 0.5, delta=0.05)

    def test_help_version_and_models(self):
        self.assertRegex(self.succeed(self.run_program("--version")).stdout, r"^tandem \d+\.\d+\.\d+\n$")
        self.assertIn("tiny-gpt2\n", self.succeed(self.run_program("--list-models")).stdout)
        for command in ["train", "plan", "eval", "sample", "digest", "export"]:
            self.assertIn("Example", self.succeed(self.run_program(command, "--help")).stdout)


class WhatIf(ProgramTest):
    def test_a_plan_tells_what_a_step_takes_that_is_not_clipped(self):
        profile = pathlib.Path(__file__).parents[2] / "profiles" / "8gb-pcie4.toml"

        def predicted(speculate, *flags, policy="host"):
            done = self.succeed(self.run_program("plan", "--model", "gpt2", "--policy", policy, "--seq-len", "128", "--profile", profile,
                                                 "--speculate", speculate, "--json", *flags))
            return json.loads(done.stdout)["predicted"]
        waits, ahead = predicted("off"), predicted("on")
        self.assertLess(ahead["step_seconds"], 0.95 * waits["step_seconds"])
        self.assertEqual(ahead["confirmed_step_seconds"], ahead["step_seconds"])
        self.assertIsNone(waits["confirmed_step_seconds"])
        default = predicted("auto")
        self.assertEqual(default["step_seconds"], waits["step_seconds"])
        self.assertAlmostEqual(default["confirmed_step_seconds"], ahead["step_seconds"], delta=1e-4)
        self.assertIsNone(predicted("auto", policy="device")["confirmed_step_seconds"])
        self.assertIsNone(predicted("auto", "--state", "lion")["confirmed_step_seconds"])

    def test_a_plan_over_a_profile_heeds_the_state_format(self):
        profile = pathlib.Path(__file__).parents[2] / "profiles" / "8gb-pcie4.toml"
        bytes_of = {}
        for state in ("fp32", "split", "bf16-moments", "8bit-moments", "lion"):
            result = self.succeed(self.run_program("plan", "--model", "gpt2", "--policy", "host", "--seq-len", "128",
                                                   "--profile", profile, "--state", state, "--speculate", "off", "--json"))
            bytes_of[state] = json.loads(result.stdout)["host_bytes"]
        self.assertGreater(bytes_of["fp32"], bytes_of["split"])
        self.assertGreater(bytes_of["split"], bytes_of["bf16-moments"])
        self.assertGreater(bytes_of["bf16-moments"], bytes_of["8bit-moments"])
        self.assertAlmostEqual(bytes_of["lion"], bytes_of["bf16-moments"], delta=bytes_of["lion"] / 1000)


if __name__ == "__main__":
    main()
