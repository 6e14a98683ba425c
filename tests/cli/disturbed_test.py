"""Runs that something comes in between of: files that change under them, other models, kills."""
import json
import subprocess

from program import SMALL, TEXT, ProgramTest, main, wait_for


class Data(ProgramTest):
    def test_data_that_is_cut_off_in_mid_run_ends_it_in_one_line(self):
        out = self.root / "run"
        self.text = self.file("cut.txt", TEXT)
        process = self.start(out, "--steps", "1000000", "--checkpoint-every", "5", "--log-every", "0", stderr=subprocess.PIPE)
        wait_for(lambda: (out / "checkpoints").is_dir() and self.checkpoints(out))
        self.file("cut.txt", TEXT[:1000])  # as an editor writes it: cut off, and filled anew
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
        for changes, words in [({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}, ["head_dim 16", "32"]),
                               ({"rope_theta": 500000.0}, ["rope_theta 10000.0", "500000.0"]),
                               ({"rms_norm_eps": 1e-6}, ["rms_norm_eps 1e-05", "1e-06"]),
                               ({"rope_scaling": rope}, ["rope_scaling null", "llama3"])]:
            with self.subTest(changes):
                model.write_text(json.dumps({**llama, **changes}))
                for resume in (["--resume"], ["--resume", out / "checkpoints" / "step-00000001"]):
                    self.refused(self.run_program(*arguments, "2", *resume), 4, "step-00000001", *words)
        # What the function does not depend on may change.
        model.write_text(json.dumps({**llama, "max_position_embeddings": 128, "initializer_range": 0.01,
                                     "architectures": ["MistralForCausalLM"], "model_type": "mistral", "eos_token_id": 3}))
        self.succeed(self.run_program(*arguments, "2", "--resume"))

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


if __name__ == "__main__":
    main()
