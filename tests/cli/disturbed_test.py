"""Runs that something comes in between of: files that change under them, other models, kills."""
import json
import random
import re
import shutil
import subprocess
import time

from program import SMALL, TEXT, ProgramTest, main, wait_for


class Data(ProgramTest):
    def test_data_that_is_cut_off_in_mid_run_ends_it_in_one_line(self):
        out = self.root / "run"
        self.text = self.file("cut.txt", TEXT)
        process = self.start(out, "--steps", "1000000", "--checkpoint-every", "5", "--log-every", "0", stderr=subprocess.PIPE)
        wait_for(lambda: (out / "checkpoints").is_dir() and self.checkpoints(out))
        self.file("cut.txt", TEXT[:1000])  # an editor cuts the file off, and fills it anew
        _, stderr = process.communicate(timeout=120)
        self.refused(subprocess.CompletedProcess([], process.returncode, "", stderr), 4, "cut.txt", "changed since the start")
        self.succeed(self.run_program("digest", out))


class Models(ProgramTest):
    def test_another_model_of_the_same_shapes_is_not_resumed(self):
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
                 "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
        out, model = self.root / "run", self.root / "config.json"
        arguments = ["train", "--model", model, "--data", self.text, *SMALL, "--out", out, "--steps"]
        model.write_text(json.dumps(llama))
        self.succeed(self.run_program(*arguments, "1"))
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32}
        windowed = {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
        for changes, words in [({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}, ["head_dim 16", "32"]),
                               ({"rope_theta": 500000.0}, ["rope_theta 10000.0", "500000.0"]),
                               ({"rms_norm_eps": 1e-6}, ["rms_norm_eps 1e-05", "1e-06"]),
                               ({"rope_scaling": rope}, ["rope_scaling null", "llama3"]),
                               ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0], "tie_word_embeddings": False},
                                ["no_rope_layers null", "[0]"]),
                               (windowed, ["sliding_window null", "8"])]:
            with self.subTest(changes):
                model.write_text(json.dumps({**llama, **changes}))
                for resume in (["--resume"], ["--resume", out / "checkpoints" / "step-00000001"]):
                    self.refused(self.run_program(*arguments, "2", *resume), 4, "step-00000001", *words)
        # Settings that the function does not depend on may change.
        model.write_text(json.dumps({**llama, "max_position_embeddings": 128, "initializer_range": 0.01,
                                     "architectures": ["MistralForCausalLM"], "model_type": "mistral", "eos_token_id": 3}))
        self.succeed(self.run_program(*arguments, "2", "--resume"))
        # A config.json that lacks a setting of the run's is refused, too.
        arguments[arguments.index(out)] = self.root / "windowed"
        model.write_text(json.dumps({**llama, **windowed}))
        self.succeed(self.run_program(*arguments, "1"))
        model.write_text(json.dumps(llama))
        self.refused(self.run_program(*arguments, "2", "--resume"), 4, "sliding_window 8", "null")

    def test_gpt2_with_other_heads_is_not_resumed(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--out", out))
        model = self.root / "model"
        self.succeed(self.run_program("export", out, "--to", model))
        config = json.loads((model / "config.json").read_text())
        resume = ["train", "--model", model, "--data", self.text, *SMALL, "--steps", "2", "--out", out, "--resume"]
        for changes, words in [({"n_head": config["n_head"] * 2}, ["n_head"]), ({"layer_norm_epsilon": 0.5}, ["epsilon", "0.5"])]:
            (model / "config.json").write_text(json.dumps({**config, **changes}))
            self.refused(self.run_program(*resume), 4, *words)
        (model / "config.json").write_text(json.dumps(config))
        self.succeed(self.run_program(*resume))


class Courses(ProgramTest):
    """A run that goes on from an earlier step than the last one, and with another rate."""
    COURSE = ["--checkpoint-every", "1", "--keep", "0", "--decay-steps", "8"]
    BRANCH = [*COURSE, "--steps", "8", "--lr", "2e-2"]

    def setUp(self):
        super().setUp()
        self.old = self.root / "old"
        self.succeed(self.train("--steps", "8", *self.COURSE, "--out", self.old))
        self.old_rate = self.rate(self.old)
        self.straight = self.branched("straight")
        self.succeed(self.train(*self.BRANCH, "--out", self.straight, "--resume", self.third(self.straight)))

    def branched(self, name):
        out = self.root / name
        shutil.copytree(self.old, out)
        return out

    def third(self, out):
        return out / "checkpoints" / "step-00000003"

    def rate(self, out):
        return re.search(r"^lr = (.+)$", (out / "config.toml").read_text(), re.M).group(1)

    def ended_as_straight(self, out):
        self.assertEqual(self.summary(out)["state_digest"], self.summary(self.straight)["state_digest"])
        self.assertEqual([m["loss"] for m in self.metrics(out)], [m["loss"] for m in self.metrics(self.straight)])

    def test_killed_before_its_first_save_it_is_on_one_course(self):
        self.assertNotEqual(self.rate(self.straight), self.old_rate)
        for here in (True, False):
            with self.subTest(here=here):
                out = self.branched(f"run{here}")
                start = self.third(out if here else self.old)
                # Its first save is far away; the rest of the branch is of the same steps.
                process = self.start(out, *self.BRANCH, "--steps", "1000000", "--checkpoint-every", "1000000", "--resume", start)
                wait_for(lambda: [m["step"] for m in self.metrics(out)][3:4] == [4] and self.rate(out) != self.old_rate)
                process.kill()
                process.wait()
                self.assertEqual(self.checkpoints(out), [f"step-{n:08}" for n in (1, 2, 3)])
                self.assertFalse((out / "summary.json").exists())
                self.succeed(self.run_program("train", "--resume", "--config", out / "config.toml", "--steps", "8", "--out", out))
                self.ended_as_straight(out)

    def test_killed_at_any_moment_it_is_on_one_course(self):
        begin = time.monotonic()
        self.succeed(self.run_program("train", "--resume", self.third(self.old), "--config", self.old / "config.toml", "--steps",
                                      "3", "--out", self.root / "short"))
        seconds = time.monotonic() - begin
        chance = random.Random(1)
        for i in range(12):
            out = self.branched(f"run{i}")
            process = self.start(out, *self.BRANCH, "--resume", self.third(out))
            time.sleep(chance.uniform(0.3, 1.2) * seconds)
            process.kill()
            process.wait()
            visible = [name for name in self.checkpoints(out) if not name.startswith(".")]
            if self.rate(out) != self.old_rate:
                self.succeed(self.run_program("train", "--resume", "--out", out))
                self.ended_as_straight(out)
            else:  # every checkpoint that is left is one of the old course
                self.assertEqual(len(self.metrics(out)), 8)
                self.assertEqual(visible, [f"step-{n:08}" for n in range(1, len(visible) + 1)])
                self.succeed(self.run_program("train", "--resume", "--out", out))
                self.assertEqual(self.summary(out)["state_digest"], self.summary(self.old)["state_digest"])
            shutil.rmtree(out)

    def test_a_damaged_checkpoint_is_passed_over_and_stays(self):
        damaged = self.old / "checkpoints" / "step-00000008" / "state.safetensors"
        state = bytearray(damaged.read_bytes())
        state[len(state) // 2] ^= 1
        damaged.write_bytes(state)
        result = self.succeed(self.run_program("train", "--resume", "--config", self.old / "config.toml", "--keep", "3", "--steps",
                                               "9", "--checkpoint-every", "0", "--out", self.old))
        self.assertIn("passed over", result.stderr)
        self.assertNotIn("are removed", result.stderr)
        self.assertEqual(self.checkpoints(self.old), ["step-00000007", "step-00000008", "step-00000009"])


if __name__ == "__main__":
    main()
