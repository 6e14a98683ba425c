"""Against transformers itself: models it writes are read, models that tandem writes are read by it, and ten steps of
fine-tuning go as in a PyTorch loop of the same rounding."""
import peers

peers.run_under_one_with("torch", "transformers", "safetensors")

import json
import pathlib
import struct
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "models"))
import make_fixtures
from program import ProgramTest, main

LENGTH, WINDOWS, STEPS = 21, 4, 10
ONE = ["--device", "host", "--threads", "1", "--update-threads", "1", "--seq-len", str(LENGTH)]


def models():
    common = {"vocab_size": 97, "initializer_range": 0.1}
    llama = {**common, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 48, "hidden_size": 40, "intermediate_size": 53}
    scaled = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    yield "gpt2", transformers.GPT2LMHeadModel, transformers.GPT2Config(
        n_positions=48, n_embd=36, n_layer=2, n_head=3, bos_token_id=1, eos_token_id=2, **common)
    yield "llama2", transformers.LlamaForCausalLM, transformers.LlamaConfig(tie_word_embeddings=False, **llama)
    yield "llama3", transformers.LlamaForCausalLM, transformers.LlamaConfig(
        tie_word_embeddings=True, rope_parameters=scaled, **llama)
    yield "mistral", transformers.MistralForCausalLM, transformers.MistralConfig(
        sliding_window=None, head_dim=12, **llama)
    yield "qwen2", transformers.Qwen2ForCausalLM, transformers.Qwen2Config(tie_word_embeddings=True, **llama)
    yield "qwen3", transformers.Qwen3ForCausalLM, transformers.Qwen3Config(
        tie_word_embeddings=False, head_dim=16, **llama)
    # With windows that sequences are longer than, in all layers and in the second.
    yield "mistral-windows", transformers.MistralForCausalLM, transformers.MistralConfig(sliding_window=6, **llama)
    yield "qwen2-windows", transformers.Qwen2ForCausalLM, transformers.Qwen2Config(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=False, **llama)
    yield "llama-biases", transformers.LlamaForCausalLM, transformers.LlamaConfig(
        attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
        **llama)
    # The scaling that files of SmolLM3 and Qwen recommend for long sequences.
    yarn = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 3.0, "original_max_position_embeddings": 16}
    yield "smollm3", transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config(
        no_rope_layer_interval=2, pad_token_id=None, rope_parameters=yarn, **llama)
    yield "phi3", transformers.Phi3ForCausalLM, transformers.Phi3Config(
        sliding_window=9, pad_token_id=None, tie_word_embeddings=False, original_max_position_embeddings=16,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.8,
                         "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}, **llama)
    yield "olmo2", transformers.Olmo2ForCausalLM, transformers.Olmo2Config(
        tie_word_embeddings=False, pad_token_id=None, **llama)
    yield "olmo3", transformers.Olmo3ForCausalLM, transformers.Olmo3Config(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"], pad_token_id=None,
        rope_parameters={"full_attention": {**yarn, "rope_theta": 500000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}, **llama)
    yield "granite", transformers.GraniteForCausalLM, transformers.GraniteConfig(
        tie_word_embeddings=True, embedding_multiplier=2.5, attention_multiplier=0.25, residual_multiplier=0.3,
        logits_scaling=1.2, **llama)
    gemma = {**llama, "head_dim": 16, "tie_word_embeddings": True, "pad_token_id": None, "bos_token_id": 1,
             "eos_token_id": 2}
    yield "gemma", transformers.GemmaForCausalLM, transformers.GemmaConfig(**gemma)
    yield "gemma3", transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=24,
        rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}, **gemma)
    # Experts, of which some find no token.
    experts = {**llama, "num_experts_per_tok": 3, "experts_implementation": "eager", "pad_token_id": None,
               "eos_token_id": 2}
    yield "mixtral", transformers.MixtralForCausalLM, transformers.MixtralConfig(
        num_local_experts=5, sliding_window=None, **experts)
    yield "qwen3-moe", transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        num_experts=40, moe_intermediate_size=19, norm_topk_prob=True, head_dim=16, tie_word_embeddings=True, **experts)
    yield "olmoe", transformers.OlmoeForCausalLM, transformers.OlmoeConfig(
        num_experts=7, tie_word_embeddings=False, **experts)


def as_transformers_4(config):
    """Description in the spelling of transformers 4."""
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope.get("full_attention", rope)  # layers of OLMo 3 with a window have no scaling
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_theta"] = rope.pop("rope_theta", 10000.0)
        config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.44.0"
    return config



def of_type(model, dtype):
    """A copy with weights of another type. (Turning a model's type turns its table of angles too, for good.)"""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other.to(dtype).eval()


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")  # others ask for sizes that these are not of
    return model


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


class Transformers(ProgramTest):
    def setUp(self):
        super().setUp()
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(0, 97, (WINDOWS * LENGTH + 1,), generator=generator)
        self.data = self.file("ids.bin", struct.pack(f"<{len(self.ids)}H", *self.ids.tolist()))
        self.windows = self.ids[:-1].reshape(WINDOWS, LENGTH)
        self.targets = self.ids[1:].reshape(WINDOWS, LENGTH)

    def built(self):
        for name, kind, config in models():
            torch.manual_seed(11)
            config.architectures = [kind.__name__]
            model = kind(config).float().eval()
            make_fixtures.randomize(model, torch.Generator().manual_seed(3))
            yield name, model

    def loss(self, model):
        with torch.no_grad():
            logits = model(self.windows, use_cache=False).logits.double()
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 97), self.targets.reshape(-1)).item()

    def evaluate(self, folder):
        result = self.run_program("eval", "--model", folder, "--data", self.data, *ONE[:4], *ONE[6:], "--json")
        return json.loads(self.succeed(result).stdout)["loss"]

    def test_reads_every_family_type_and_spelling(self):
        for name, model in self.built():
            expected = self.loss(model)
            for dtype, shard, older in [(torch.float32, "5GB", False), (torch.bfloat16, "20KB", True),
                                        (torch.float16, "5GB", True)]:
                with self.subTest(name, dtype=dtype, older=older):
                    folder = self.root / f"{name}-{dtype}"
                    stored = of_type(model, dtype)
                    if dtype == torch.float16:  # values that half cannot hold make another model
                        expected = self.loss(of_type(stored, torch.float32))
                    stored.save_pretrained(folder, max_shard_size=shard)
                    self.assertEqual((folder / "model.safetensors.index.json").exists(), shard == "20KB")
                    if older:
                        config = folder / "config.json"
                        config.write_text(json.dumps(as_transformers_4(json.loads(config.read_text()))))
                    loss = self.evaluate(folder)
                    self.assertLess(abs(loss / expected - 1), 1e-5)

    def test_greedy_tokens_are_those_of_generate(self):
        prompt = self.ids[:9]
        for name, model in self.built():
            with self.subTest(name):
                folder = self.root / f"{name}-generated"
                stored = of_type(model, torch.bfloat16)
                stored.generation_config.eos_token_id = [2, 3]
                stored.save_pretrained(folder)
                with torch.no_grad():
                    made = load(folder).generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False,
                                                 max_new_tokens=30, pad_token_id=0)[0, len(prompt):].tolist()
                ended = next((i for i, token in enumerate(made) if token in (2, 3)), len(made))
                result = self.run_program("sample", "--model", folder, *ONE[:4], "--prompt-ids",
                                          " ".join(map(str, prompt.tolist())), "--temperature", "0", "--max-tokens", "30",
                                          "--json")
                sample = json.loads(self.succeed(result).stdout)
                self.assertEqual(sample["tokens"], made[:ended])
                self.assertEqual(sample["finish"], "length" if ended == len(made) else "end token")

    def test_what_comes_in_goes_out_bit_by_bit(self):
        for name, model in self.built():
            for flag, dtype in [("fp32", torch.float32), ("bf16", torch.bfloat16)]:
                with self.subTest(name, dtype=flag):
                    source, out = self.root / f"{name}-{flag}", self.root / f"{name}-{flag}-out"
                    of_type(model, dtype).save_pretrained(source)
                    self.succeed(self.run_program("export", source, "--to", out, "--dtype", flag, "--shard-size", "20kB"))
                    before, after = tensors_of(source), tensors_of(out)
                    self.assertEqual(set(before), set(after))
                    for key, tensor in before.items():
                        self.assertEqual(after[key].dtype, dtype)
                        self.assertTrue(torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key)
                    loaded = load(out)
                    with torch.no_grad():
                        apart = (loaded(self.windows).logits - model(self.windows).logits).abs().max().item()
                    self.assertLess(apart, 1e-4)
                    self.assertEqual(loaded.config.eos_token_id, model.config.eos_token_id)

    def test_ten_steps_as_in_pytorch_and_the_result_loads(self):
        for name, model in self.built():
            with self.subTest(name):
                source, run, out = (self.root / f"{name}-{part}" for part in ("in", "run", "out"))
                model.save_pretrained(source)
                make_fixtures.STEPS = STEPS
                make_fixtures.OPTIMIZER = {"lr": 2e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
                                           "clip": 1.0}
                expected = make_fixtures.trajectory(model, self.windows.expand(STEPS, -1, -1),
                                                    self.targets.expand(STEPS, -1, -1)).tolist()
                self.succeed(self.run_program("train", "--model", source, "--data", self.data, "--out", run, *ONE,
                                              "--micro-batch", WINDOWS, "--steps", STEPS, "--lr", "2e-4",
                                              "--lr-schedule", "constant", "--eval-data", self.data))
                losses = [m["loss"] for m in self.metrics(run)]
                self.assertEqual(len(losses), STEPS)
                self.assertLess(losses[-1], losses[0])
                for ours, theirs in zip(losses, expected):
                    self.assertLess(abs(ours / theirs - 1), 1e-4)
                self.succeed(self.run_program("export", run, "--to", out))
                loaded = load(out)
                self.assertLess(abs(self.loss(loaded) / self.summary(run)["eval_loss"] - 1), 1e-5)

    def test_of_a_model_that_sees_the_part_of_text_is_trained(self):
        text = next(config for name, _, config in models() if name == "gemma3")
        sight = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "image_size": 8, "patch_size": 4}
        model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
            text_config=text.to_dict(), vision_config=sight, mm_tokens_per_image=4)).float().eval()
        make_fixtures.randomize(model, torch.Generator().manual_seed(3))
        for spelling in ("as written", "of transformers 4.50"):
            with self.subTest(spelling):
                source, run, out = (self.root / f"{spelling[:2]}-{part}" for part in ("in", "run", "out"))
                model.save_pretrained(source)
                if spelling != "as written":
                    tensors = {name.removeprefix("model.") if "vision" in name or "projector" in name
                               else name.replace("model.language_model.", "language_model.model."): tensor
                               for name, tensor in tensors_of(source).items()}
                    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
                self.assertLess(abs(self.evaluate(source) / self.loss(model) - 1), 1e-5)
                result = self.succeed(self.run_program("train", "--model", source, "--data", self.data, "--out", run, *ONE,
                                                       "--micro-batch", WINDOWS, "--steps", 2, "--eval-data", self.data))
                self.assertIn("its vision tensors are left out, also of what is saved or exported; it is taken as Gemma3ForCausalLM", result.stderr)
                self.succeed(self.run_program("export", run, "--to", out))
                loaded = load(out)
                self.assertEqual(type(loaded).__name__, "Gemma3ForCausalLM")
                self.assertLess(abs(self.loss(loaded) / self.summary(run)["eval_loss"] - 1), 1e-5)


if __name__ == "__main__":
    main()
