"""Refusals and warnings speak of what was typed, by its own name."""
from program import SMALL, ProgramTest, main


class TrainedModels(ProgramTest):
    def setUp(self):
        super().setUp()
        self.run_folder = self.root / "run"
        self.succeed(self.train("--steps", "2", "--checkpoint-every", "1", "--out", self.run_folder))

    def test_digest_says_which_checkpoint_it_passes_over(self):
        good = self.succeed(self.run_program("digest", self.run_folder / "checkpoints" / "step-00000001"))
        with (self.run_folder / "checkpoints" / "step-00000002" / "state.safetensors").open("r+b") as state:
            state.truncate(1000)
        result = self.succeed(self.run_program("digest", self.run_folder))
        self.assertEqual(result.stdout, good.stdout)
        self.assertRegex(result.stderr, "warning: passed over: .*step-00000002")

    def test_sampling_out_of_range(self):
        for flag, value in [("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "-0.5"),
                            ("--max-tokens", "0"), ("--top-k", "-1")]:
            with self.subTest(flag=flag, value=value):
                result = self.run_program("sample", "--model", self.run_folder, "--prompt", "x", flag, value)
                self.refused(result, 2, flag, value, "out of range")

    def test_words_for_a_model_with_its_own_tokens(self):
        model = self.root / "model"
        self.succeed(self.run_program("export", self.run_folder, "--to", model))
        config = model / "config.json"
        config.write_text(config.read_text().replace("tandem_token_kind", "another_key"))
        self.succeed(self.run_program("sample", "--model", model, "--prompt", "1 2", "--max-tokens", "2", *SMALL[:4]))
        self.refused(self.run_program("sample", "--model", model, "--prompt", "abc"), 2, "--prompt", "token ids", "'abc'")

    def test_export_names_what_it_was_given(self):
        to = ["--to", self.root / "exported"]
        self.refused(self.run_program("export", self.run_folder, *to, "--shard-size", "-1"), 2, "--shard-size", "'-1'")
        (self.root / "hollow").mkdir()
        for source in ("nope", "tiny-gpt2", self.root / "hollow"):
            line = self.refused(self.run_program("export", source, *to), 2, f"export {source}")
            self.assertNotIn("--model", line)


class Files(ProgramTest):
    def test_data_is_named_by_its_flag(self):
        short = self.file("short.txt", "abc")
        self.refused(self.train("--steps", "1", data=short), 4, "--data shorter than one sequence")
        self.refused(self.train("--steps", "1", "--eval-data", short), 4, "--eval-data shorter than one sequence")
        run, model = self.root / "run", self.root / "model"
        self.succeed(self.train("--steps", "1", "--out", run))
        self.succeed(self.run_program("export", run, "--to", model))
        config = model / "config.json"
        config.write_text(config.read_text().replace("tandem_token_kind", "another_key"))
        ids = self.file("ids.bin", bytes(1000))
        line = self.refused(self.run_program("train", "--model", model, "--data", ids, "--eval-data", self.text, *SMALL,
                                             "--steps", "1"), 2, "prepare_data.py")
        self.assertIn("error: --eval-data: ", line)

    def test_paths_of_a_run_that_began_elsewhere(self):
        began, here = self.root / "began", self.root / "here"
        self.file("began/text.txt", self.text.read_text())
        here.mkdir()
        train = ["train", "--model", "tiny-gpt2", "--data", "text.txt", *SMALL, "--steps", "1", "--out", "run"]
        self.succeed(self.run_program(*train, cwd=began))
        config = began / "run" / "config.toml"
        config.write_text(config.read_text().replace(f"{began}/text.txt", "text.txt"))  # older versions kept it so
        resume = ["train", "--resume", "--out", began / "run", "--steps", "2"]
        self.refused(self.run_program(*resume, cwd=here), 2, f"{began}/run/config.toml: --data text.txt", "the run began")
        self.succeed(self.run_program(*resume, "--data", self.text, cwd=here))
        config.write_text(config.read_text().replace('"tiny-gpt2"', '"m/shape"'))
        self.refused(self.run_program(*resume, cwd=here), 2, "config.toml: --model m/shape", "give --model")

    def test_a_folder_is_no_file(self):
        (self.root / "ids.json").mkdir()
        ids = self.file("ids.bin", bytes(1000))
        self.refused(self.train("--steps", "1", data=ids), 4, "ids.json", "no regular file")
        (self.root / "model" / "config.json").mkdir(parents=True)
        self.refused(self.run_program("plan", "--model", self.root / "model"), 2, "config.json", "no regular file")

    def test_what_is_not_a_number_has_no_sign(self):
        result = self.train("--steps", "14", "--lr", "1e38", "--on-nonfinite", "skip")
        self.refused(result, 6)
        self.assertRegex(result.stdout, r"norm nan ")
        self.assertNotIn("-nan", result.stdout)


if __name__ == "__main__":
    main()
