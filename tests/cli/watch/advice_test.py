"""Advice fits the subcommand that gives it, and a plan says what people ask it in words they know."""
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import PROFILES, SMALL, ProgramTest, main  # noqa: E402


class OfUse(ProgramTest):
    """`eval`, `sample` and `export` give no advice for training."""

    def flags_of(self, command):
        help_text = self.succeed(self.run_program(command, "--help")).stdout
        return set(re.findall(r"--[a-z][a-z-]*", help_text))

    def refused_with_own_flags(self, code, *arguments):
        line = self.refused(self.run_program(*arguments), code)
        advice = line.rsplit("; ", 1)[-1]
        self.assertLessEqual(set(re.findall(r"--[a-z][a-z-]*", advice)), self.flags_of(arguments[0]), line)
        return line

    def test_without_a_model(self):
        for command in ("eval", "sample"):
            self.assertIn("runs/first", self.refused_with_own_flags(2, command))

    def test_of_weights_in_another_format(self):
        run, model = self.root / "run", self.root / "model"
        self.succeed(self.train("--steps", "1", "--out", run))
        self.succeed(self.run_program("export", run, "--to", model))
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
        for use in (["eval", "--model", model, "--data", self.text], ["sample", "--model", model, "--prompt", "a"],
                    ["export", model, "--to", self.root / "again"]):
            self.assertNotIn("random weights", self.refused_with_own_flags(4, *use))
        self.assertIn("--from-scratch", self.refused(self.run_program("train", "--model", model, "--data", self.text, "--steps",
                                                                      "1"), 4))

    def test_of_text_for_token_ids(self):
        run, model = self.root / "run", self.root / "model"
        self.succeed(self.train("--steps", "1", "--out", run))
        self.succeed(self.run_program("export", run, "--to", model))
        config = model / "config.json"
        config.write_text(config.read_text().replace("tandem_token_kind", "another_key"))
        line = self.refused_with_own_flags(2, "eval", "--model", model, "--data", self.text, *SMALL[:4])
        self.assertIn("prepare_data.py", line)

    def test_of_names_that_are_none(self):
        self.assertIn("a run", self.refused_with_own_flags(2, "eval", "--model", "tinygpt2", "--data", self.text))
        (self.root / "gguf").mkdir()
        self.file("gguf/model.gguf", b"GGUF\3\0")
        self.assertIn("make safetensors", self.refused(self.run_program("sample", "--model", self.root / "gguf", "--prompt", "a"), 2))
        self.file("adapter/adapter_config.json", '{"base_model_name_or_path": "org/base"}')
        self.refused(self.run_program("export", self.root / "adapter", "--to", "x"), 2, "adapter_model.safetensors")

    def test_the_seed_of_sample_is_that_of_its_draws(self):
        help_text = self.succeed(self.run_program("sample", "--help")).stdout
        self.assertRegex(help_text, r"--seed SEED +of the draws")


class Plans(ProgramTest):
    def plan(self, *flags):
        return self.run_program("plan", "--model", "gpt2", "--seq-len", "256", "--policy", "host", "--recompute", "block", *flags)

    def test_a_shipped_profile_by_name(self):
        for file in sorted(PROFILES.glob("*.toml")):
            by_name = self.plan("--profile", file.stem, "--json")
            self.assertEqual((by_name.returncode, by_name.stdout), (lambda r: (r.returncode, r.stdout))(
                self.plan("--profile", file, "--json")), file.stem)
        line = self.refused(self.plan("--profile", "13gb"), 2, "13gb", "neither a file")
        for name, content in (("dir/x", ""), ("empty.toml", ""), ("binary.toml", bytes(range(256))), ("broken.toml", "a = [")):
            self.file(name, content)
        # Exit codes: 4 where a path names no file that can be read, 2 for what is no profile.
        for name, code, words in [("none.toml", 4, ["no such file", "12gb-pcie4"]), ("./none", 4, ["no such file"]),
                                  ("dir", 4, ["cannot read", "regular file"]), ("/dev/zero", 4, ["cannot read"]),
                                  ("empty.toml", 2, ["missing", "calibrate --out"]), ("binary.toml", 2, ["UTF-8", "calibrate --out"]),
                                  ("broken.toml", 2, ["line 1", "calibrate --out"])]:
            for command in (["plan", "--model", "tiny-gpt2"], ["bench", "--model", "tiny-gpt2", *SMALL], ["calibrate", "--show"]):
                self.refused(self.run_program(*command, "--profile", name, cwd=self.root), code, f"--profile {name}:", *words)
        self.refused(self.plan("--profile", ""), 2, "--profile", "empty")
        (self.root / "12gb-pcie4").mkdir()  # a folder does not hide a shipped profile
        self.succeed(self.run_program("calibrate", "--show", "--profile", "12gb-pcie4", cwd=self.root))
        for file in PROFILES.glob("*.toml"):
            self.assertIn(file.stem, line)
        shown = self.succeed(self.run_program("calibrate", "--show", "--profile", "12gb-pcie4")).stdout
        self.assertIn("profile: 12gb-pcie4", shown)
        bench = self.run_program("bench", "--model", "tiny-gpt2", "--profile", "12gb-pcie4", "--policies", "host", *SMALL)
        self.assertIn("host", self.succeed(bench).stdout)

    def test_a_file_goes_before_a_name(self):
        here = self.root / "here"
        self.file("here/12gb-pcie4", (PROFILES / "24gb-pcie4.toml").read_text())
        text = self.succeed(self.run_program("calibrate", "--show", "--profile", "12gb-pcie4", "--json", cwd=here)).stdout
        self.assertEqual(json.loads(text)["figures"]["device.memory"]["value"] > 20e9, True)

    def test_the_time_of_so_many_tokens(self):
        flags = ["--profile", "24gb-pcie4", "--tokens", "10M", "--grad-accum", "4"]
        plan = json.loads(self.succeed(self.plan(*flags, "--json")).stdout)
        self.assertEqual(plan["tokens"]["count"], 10_000_000)
        self.assertAlmostEqual(plan["tokens"]["seconds"], 10e6 / plan["predicted"]["tokens_per_second"], places=6)
        seconds = round(plan["tokens"]["seconds"])
        shown = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        self.assertRegex(self.succeed(self.plan(*flags)).stdout, rf"\n10.* tokens +{shown} ")
        self.refused(self.plan("--tokens", "10M", "--device", "host"), 2, "--tokens", "calibrate")
        self.refused(self.plan("--profile", "24gb-pcie4", "--tokens", "0"), 2, "--tokens 0")
        self.refused(self.plan("--profile", "24gb-pcie4", "--tokens", "many"), 2, "--tokens")

    def test_phases_are_of_all_micro_batches(self):
        def phases(micro_batches):
            flags = ["--policy", "device", "--grad-accum", micro_batches, "--accumulation-order", "micro-batch"]
            plan = json.loads(self.succeed(self.plan("--profile", "80gb-pcie5", *flags, "--json")).stdout)["predicted"]
            return plan["forward_seconds"] - plan["exposed_update_seconds"], plan["backward_seconds"]
        one, eight = phases(1), phases(8)
        self.assertAlmostEqual(eight[0] / one[0], 8.0, delta=3.0)  # the first fetches more
        self.assertAlmostEqual(eight[1] / one[1], 8.0, delta=0.5)

    def test_steps_that_are_only_bounded_are_marked(self):
        plan = ["plan", "--model", "gpt2-large", "--seq-len", "256", "--device-memory", "2GiB", "--profile", "dram-starved",
                "--explain"]
        candidates = json.loads(self.succeed(self.run_program(*plan, "--json")).stdout)["candidates"]
        shown = re.findall(r"^(?:chosen|  then) (.{30}) *([\d.]+) s (or more)? ", self.succeed(self.run_program(*plan)).stdout, re.M)
        self.assertEqual([bool(more) for _, _, more in shown], ["at_least_seconds" in c for c in candidates[:len(shown)]])
        self.assertEqual({bool(more) for _, _, more in shown}, {True, False})


if __name__ == "__main__":
    main()
