"""Files of a save, when the disk refuses, and when signals come."""
import json
import os
import resource
import signal
import subprocess
import time

from program import PROGRAM, SMALL, TEXT, ProgramTest, main, wait_for


class Saving(ProgramTest):
    def train_with_limit(self, file_bytes, *arguments):
        """Trains on a disk that has no more room for a file than that."""
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        return subprocess.run([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), *SMALL,
                               *map(str, arguments)], capture_output=True, text=True, timeout=300, preexec_fn=limit)

    def plan(self, *flags):
        return json.loads(self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, "--checkpoint-every", "1",
                                                        *flags, "--json")).stdout)

    def no_room_for_a_copy(self, *flags):
        """The ceiling under which there is room for everything but the copy of the state."""
        ceiling = ["--host-memory", str(self.plan(*flags)["host_bytes"] - (10 << 20))]
        self.assertFalse(self.plan(*flags, *ceiling)["saving"]["copies_state"])
        return ceiling

    def test_from_a_copy_or_beside_training_the_bytes_are_the_same(self):
        self.assertTrue(self.plan()["saving"]["copies_state"])
        beside = self.no_room_for_a_copy()
        states = []
        for name, ceiling, row, said in [("copy", [], "checkpoint copy", ["from a copy", "updates waited"]),
                                         ("beside", beside, "checkpoint buffer", ["beside training", "updates waited"])]:
            out = self.root / name
            result = self.succeed(self.train("--steps", "4", "--checkpoint-every", "1", "--keep", "0", *ceiling, "--out",
                                             out))
            rows = {e["name"] for e in self.plan(*ceiling)["entries"] if e["name"].startswith("checkpoint")}
            self.assertEqual(rows, {row})
            self.assertEqual(result.stdout.count("saved "), 4)
            for words in said:
                self.assertIn(words, result.stdout)
            states.append([(path / "state.safetensors").read_bytes() for path in sorted((out / "checkpoints").iterdir())])
            summary = self.summary(out)
            self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])
        self.assertEqual(len(states[0]), 4)
        self.assertEqual(states[0], states[1])

    def test_saving_beside_training_changes_no_bit_and_has_a_lane_in_the_trace(self):
        for i, flags in enumerate([["--policy", "host"], ["--policy", "stream", "--resident-layers", "0"],
                                   ["--policy", "interleave:2,resident=0.3", "--state", "split"],
                                   ["--policy", "interleave:2", "--state", "8bit-moments"],
                                   ["--policy", "host", "--state", "bf16-moments", "--clip", "0", "--on-nonfinite", "stop"]]):
            with self.subTest(flags=flags):
                digests, reads = set(), []
                trace = self.root / "trace.json"
                saving = ["--checkpoint-every", "1", *self.no_room_for_a_copy(*flags)]
                for name, more in [("each-step", saving), ("once", [])]:
                    out = self.root / f"{name}{i}"
                    self.succeed(self.train("--steps", "4", *flags, *more, "--trace", trace, "--out", out))
                    reads.append(trace.read_text().count("save_state"))
                    digests.add(self.summary(out)["state_digest"])
                self.assertEqual(len(digests), 1)
                self.assertGreater(reads[1], 0)
                self.assertEqual(reads[0], 4 * reads[1])

    def test_host_memory_stays_within_the_plan_in_every_state_format(self):
        # The largest parameter is most of the model: whatever holds one more copy of that shows.
        model = self.file("wide.json", json.dumps(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 60013, "hidden_size": 64,
             "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
             "max_position_embeddings": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}))
        data = self.file("ids.bin", b"".join(i.to_bytes(2, "little") for i in range(0, 60000, 7)))
        arguments = ["--model", model, "--policy", "host", *SMALL]
        plan = json.loads(self.succeed(self.run_program("plan", *arguments, "--checkpoint-every", "1", "--json")).stdout)
        beside = ["--checkpoint-every", "1", "--host-memory", str(plan["host_bytes"] - (10 << 20))]
        for i, flags in enumerate([["--state", "split", "--checkpoint-every", "1"], ["--state", "bf16-moments"],
                                   ["--state", "8bit-moments", "--checkpoint-every", "1"],
                                   ["--state", "lion", "--checkpoint-every", "1"],
                                   ["--state", "fp32", *beside], ["--state", "fp32", "--freeze", "embed_tokens"]]):
            for steps, resume in [(1, []), (2, ["--resume"])]:
                with self.subTest(flags=flags, steps=steps):
                    out = self.root / f"run{i}"
                    self.succeed(self.run_program("train", *arguments, *flags, "--data", data, "--steps", steps,
                                                  *resume, "--out", out))
                    summary = self.summary(out)
                    self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])

    def test_a_full_disk_ends_the_run_and_keeps_the_old_checkpoint(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", "--out", out))
        digest = self.summary(out)["state_digest"]
        before = (out / "checkpoints" / "step-00000002" / "state.safetensors").read_bytes()
        for ceiling in [[], self.no_room_for_a_copy()]:
            result = self.train_with_limit(1 << 20, "--steps", "6", "--checkpoint-every", "2", "--resume", *ceiling, "--out",
                                           out)
            self.refused(result, 7, "step-00000004")
            self.assertEqual(self.checkpoints(out), ["step-00000002"])
            self.assertEqual((out / "checkpoints" / "step-00000002" / "state.safetensors").read_bytes(), before)
            self.assertEqual(self.succeed(self.run_program("digest", out)).stdout.strip(), digest)

    def test_it_goes_on_where_told_to_but_never_ends_unsaved(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", "--out", out))
        for ceiling in [[], self.no_room_for_a_copy()]:
            result = self.train_with_limit(1 << 20, "--steps", "6", "--checkpoint-every", "2", "--resume",
                                           "--on-save-failure", "continue", *ceiling, "--out", out)
            self.refused(result, 7, "step-00000006")
            self.assertIn("checkpoint of step 4 failed, the run goes on", result.stderr)
            self.assertEqual(len(self.metrics(out)), 6)
            self.assertEqual(self.checkpoints(out), ["step-00000002"])
        self.succeed(self.run_program("train", "--resume", "--out", out, "--steps", "6"))
        self.assertEqual(self.summary(out)["resumed_from_step"], 2)

    def test_the_second_signal_leaves_at_once_and_the_old_checkpoint_stays(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", "--out", out))
        digest = self.summary(out)["state_digest"]
        for second in (signal.SIGINT, signal.SIGTERM):
            # A step of a hundred thousand micro-batches takes far longer than this test: the first signal cannot end it.
            process = self.start(out, "--steps", "1000", "--resume", "--grad-accum", "100000", stdout=subprocess.PIPE)
            self.addCleanup(process.stdout.close)
            for line in process.stdout:
                if line.startswith("resumed from"):
                    break
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            self.assertIsNone(process.poll(), "the first signal lets the step end")
            process.send_signal(second)
            self.assertEqual(process.wait(timeout=60), -second)
        self.assertEqual(self.succeed(self.run_program("digest", out)).stdout.strip(), digest)

    def test_a_signal_does_not_wait_for_a_validation(self):
        held_out = self.file("minutes.txt", TEXT * 200)
        for steps in ("3", "1"):  # after a step, and after the last one
            out = self.root / f"run{steps}"
            process = self.start(out, "--steps", steps, "--eval-data", held_out, "--eval-every", "1", "--keep-best")
            wait_for(lambda: (out / "metrics.jsonl").exists())
            time.sleep(0.5)  # the step takes less
            process.terminate()
            self.assertEqual(process.wait(timeout=30), 143)
            self.assertEqual(self.checkpoints(out), ["step-00000001"])
            self.assertNotIn("eval_loss", self.metrics(out)[0])
            self.assertIsNone(self.summary(out)["eval_loss"])
        self.succeed(self.run_program("train", "--resume", "--config", out / "config.toml", "--eval-data", self.held_out(), "--out",
                                      out))
        self.assertIsNotNone(self.summary(out)["eval_loss"])

    def test_a_second_fresh_run_is_refused_too(self):
        out = self.root / "run"
        process = self.start(out, "--steps", "1000000")
        wait_for(lambda: (out / "metrics.jsonl").exists())
        self.refused(self.train("--steps", "1", "--out", out), 7, "another process")
        process.terminate()
        self.assertEqual(process.wait(timeout=120), 143)

    def test_the_best_checkpoint_stays(self):
        out = self.root / "run"
        # A rate that destroys what was learnt: the first evaluation is the best.
        self.succeed(self.train("--steps", "6", "--eval-data", self.held_out(), "--eval-every", "1", "--keep-best", "--keep", "1",
                                "--checkpoint-every", "1", "--lr", "0.5", "--lr-schedule", "constant", "--out", out))
        losses = [m["eval_loss"] for m in self.metrics(out)]
        best = losses.index(min(losses)) + 1
        self.assertLess(best, 6)
        self.assertEqual(self.checkpoints(out), [f"step-{best:08}", "step-00000006"])

    def test_a_loss_that_is_not_finite_is_not_the_best(self):
        out = self.root / "run"
        tokens = self.file("ids.bin", bytes([5, 0]) * 1000)
        held_out = self.file("held-out.bin", bytes([5, 0]) * 100)
        self.file("held-out.mask.bin", bytes([1] + [0] * 99))  # the first token is never predicted: a mean over nothing
        self.succeed(self.train("--steps", "3", "--eval-data", held_out, "--eval-every", "1", "--keep-best", "--keep", "1",
                                "--checkpoint-every", "1", "--out", out, data=tokens))
        self.assertEqual([m["eval_loss"] for m in self.metrics(out)], [None] * 3)
        self.assertEqual(self.checkpoints(out), ["step-00000003"])

    def test_resuming_an_older_checkpoint_leaves_the_later_course(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "4", "--checkpoint-every", "1", "--keep", "0", "--out", out))
        digest = self.summary(out)["state_digest"]
        result = self.succeed(self.run_program("train", "--out", out, "--resume", out / "checkpoints" / "step-00000001",
                                               "--config", out / "config.toml", "--steps", "3", "--decay-steps", "4"))
        self.assertIn("leaves", result.stderr)
        self.assertEqual(self.checkpoints(out), ["step-00000001", "step-00000002", "step-00000003"])
        self.succeed(self.run_program("train", "--out", out, "--resume", "--steps", "4"))
        self.assertEqual(self.summary(out)["state_digest"], digest)

    def test_any_ceiling_policy_and_subgroup_resumes_to_the_same_bits(self):
        first = self.root / "first"
        self.succeed(self.train("--steps", "3", "--decay-steps", "6", "--out", first))
        digests, losses = set(), set()
        for i, flags in enumerate([["--policy", "device"], ["--policy", "host", "--device-memory", "24MiB"],
                                   ["--policy", "stream", "--subgroup-size", "4097", "--resident-layers", "0"],
                                   ["--policy", "static:0.5", "--recompute", "block", "--prefetch-layers", "1"],
                                   ["--policy", "interleave:2", "--host-memory", "200MiB", "--subgroup-size", "1Mi"]]):
            out = self.root / f"run{i}"
            self.succeed(self.train("--steps", "6", "--out", out, "--resume", first, *flags))
            digests.add(self.summary(out)["state_digest"])
            losses.add(tuple(m["loss"] for m in self.metrics(out)))
        straight = self.root / "straight"
        self.succeed(self.train("--steps", "6", "--out", straight))
        self.assertEqual(digests, {self.summary(straight)["state_digest"]})
        self.assertEqual(losses, {tuple(m["loss"] for m in self.metrics(straight))[3:]})

    def test_another_lossless_state_format_resumes_to_the_same_bits(self):
        straight = self.root / "straight"
        self.succeed(self.train("--steps", "6", "--out", straight))
        losses = [m["loss"] for m in self.metrics(straight)]
        for before, behind in [("fp32", "split"), ("split", "fp32")]:
            with self.subTest(before=before, behind=behind):
                first, second = self.root / f"{before}-first", self.root / f"{behind}-second"
                self.succeed(self.train("--steps", "3", "--decay-steps", "6", "--state", before, "--out", first))
                resumed = self.succeed(self.train("--steps", "6", "--state", behind, "--resume", first, "--out", second))
                self.assertNotIn("compute_key", resumed.stderr)
                self.assertEqual(self.summary(second)["state_digest"], self.summary(straight)["state_digest"])
                self.assertEqual([m["loss"] for m in self.metrics(second)], losses[3:])

    def test_nothing_is_world_writable(self):
        out = self.root / "run"
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        self.succeed(self.train("--steps", "1", "--out", out))
        self.succeed(self.run_program("export", out, "--to", self.root / "model"))
        for path in [out, *out.rglob("*"), *(self.root / "model").rglob("*")]:
            self.assertFalse(path.stat().st_mode & 0o002, path)

    def test_an_unwritable_folder(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--out", out))
        (out / "checkpoints" / "step-00000001").rename(self.root / "kept")
        (out / "checkpoints").rmdir()
        (out / "checkpoints").write_text("a file in the way")
        result = self.train("--steps", "2", "--out", out, "--resume", self.root / "kept")
        self.refused(result, 7, "checkpoints")

    def test_a_longer_run_says_whether_its_learning_rates_go_on(self):
        whole = self.root / "whole"
        for name, flags, warned in [("cosine", [], True), ("fixed", ["--decay-steps", "8"], False),
                                    ("constant", ["--lr-schedule", "constant"], False)]:
            with self.subTest(name):
                out = self.root / name
                self.succeed(self.train("--steps", "4", *flags, "--out", out))
                longer = self.succeed(self.run_program("train", "--resume", "--out", out, "--steps", "8"))
                self.assertEqual("another schedule" in longer.stderr, warned, longer.stderr)
                self.succeed(self.train("--steps", "8", *flags, "--out", whole / name))
                digests = {self.summary(run)["state_digest"] for run in (out, whole / name)}
                self.assertEqual(len(digests), 2 if warned else 1)

    def test_a_manifest_does_not_grow_with_the_subgroups(self):
        manifests = {}
        for size in ("1024", "1Gi"):
            self.succeed(self.train("--steps", "1", "--policy", "host", "--subgroup-size", size, "--out", self.root / size))
            (checkpoint,) = (self.root / size / "checkpoints").iterdir()
            manifests[size] = (checkpoint / "manifest.json").read_text()
        plans = {size: json.loads(text)["plan"] for size, text in manifests.items()}
        self.assertGreater(plans["1024"]["subgroups"], 50 * plans["1Gi"]["subgroups"])
        self.assertEqual(plans["1024"]["updated_parameters"], plans["1Gi"]["updated_parameters"])
        self.assertLess(len(manifests["1024"]), len(manifests["1Gi"]) + 100)

    def test_a_checkpoint_that_names_no_model_says_so(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--out", out))
        (checkpoint,) = (out / "checkpoints").iterdir()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest.update(model="", model_config={}, token_kind="", compute_key="")  # empty after OffloadEngine::save
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        self.assertEqual(self.succeed(self.run_program("digest", checkpoint)).stdout.split()[0], manifest["state_digest"])
        for arguments in (["export", checkpoint, "--to", self.root / "to"], ["eval", "--model", checkpoint, "--data", self.text]):
            self.refused(self.run_program(*arguments), 4, "names no model", "OffloadEngine::load")


if __name__ == "__main__":
    main()
