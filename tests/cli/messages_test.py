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


if __name__ == "__main__":
    main()
