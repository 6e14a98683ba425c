"""Weights from files: equal to what transformers loads, one copy of them in all, and each fault of a folder told in one line."""
import json
import pathlib
import sys
import tempfile
import unittest
import unittest.mock
import warnings

from sandbox import tandem, torch
from stream_test import Model, batches

try:
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError:
    print("skipped: no transformers")
    raise SystemExit(77) from None

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 64, "max_position_embeddings": 32}


def configs():
    """A tied one, one whose experts transformers fuses, and one with fp32 among bf16 in its files."""
    return {"tied": transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
            "experts": transformers.MixtralConfig(**COMMON, num_local_experts=4),
            "vision": transformers.ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                                             patch_size=8)}


def model_of(config):
    kind = transformers.AutoModelForImageClassification if config.model_type == "vit" else transformers.AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.bfloat16)


class Source(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def saved(self, config, **how):
        torch.manual_seed(3)
        plain = model_of(config)
        plain.save_pretrained(self.folder, **how)
        return plain

    def streamed(self, config, **options):
        with tandem.empty_parameters():
            model = model_of(config)
        self.assertTrue(all(p.is_meta for p in model.parameters()))
        return tandem.stream(model, **{"source": self.folder, "device": "host", "device_memory": "2MiB", **options})

    def test_weights_and_outputs_are_those_of_transformers(self):
        for name, config in configs().items():
            with self.subTest(name):
                plain = self.saved(config)
                model = self.streamed(config)
                for (key, mine), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
                    self.assertTrue(torch.equal(mine, other), key)
                given = {"pixel_values": torch.randn(2, 3, 16, 16).bfloat16()} if name == "vision" else {"input_ids": torch.arange(20).view(2, 10)}
                with torch.no_grad():
                    self.assertTrue(torch.equal(model.eval()(**given).logits, plain.eval()(**given).logits))

    def test_files_in_several_parts(self):
        plain = self.saved(configs()["tied"], max_shard_size="20KB")
        self.assertGreater(len(list(self.folder.glob("*.safetensors"))), 2)
        model = self.streamed(configs()["tied"])
        for (key, mine), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            self.assertTrue(torch.equal(mine, other), key)

    def test_what_is_saved_loads_in_transformers(self):
        for name in ("tied", "experts"):
            self.saved(configs()[name])
            model = self.streamed(configs()[name])
            optimizer = model.tandem.optimizer(lr=1e-2)
            tokens = torch.arange(20).view(2, 10)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            with tempfile.TemporaryDirectory() as out:
                model.save_pretrained(out)
                self.assertEqual(sorted(load_file(pathlib.Path(out) / "model.safetensors")),
                                 sorted(load_file(self.folder / "model.safetensors")))
                again = transformers.AutoModelForCausalLM.from_pretrained(out)
            for (key, mine), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
                self.assertTrue(torch.equal(mine, other), key)

    def test_a_module_of_ones_own(self):
        plain = Model(dtype=torch.bfloat16)
        state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
        save_file(state, self.folder / "model.safetensors")
        with tandem.empty_parameters():
            model = Model(dtype=torch.bfloat16)
        tandem.stream(model, source=self.folder, device="host", device_memory="1MiB")
        for (key, mine), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            self.assertTrue(torch.equal(mine, other), key)
        optimizer = model.tandem.optimizer(lr=1e-2)
        model.loss(batches(1)[0]).backward()
        optimizer.step()

    def test_one_tensor_at_a_time(self):
        """Tensors that transformers would load in threads, all at once, are asked for as they are written."""
        self.saved(configs()["experts"])
        alive, most = 0, 0
        write = tandem.OffloadEngine.write

        class Counted:
            def __init__(self, inner):
                self.inner = inner

            def __getitem__(self, key):
                nonlocal alive, most
                alive += 1
                most = max(most, alive)
                return self.inner[key]

            def __getattr__(self, name):
                return getattr(self.inner, name)

        from tandem.pytorch import weight_files
        original = weight_files._convert

        def counted(module, tensors, take):
            def took(name, values):
                nonlocal alive
                take(name, values)
                alive = 0
            return original(module, {name: Counted(value) for name, value in tensors.items()}, took)

        with unittest.mock.patch.object(weight_files, "_convert", counted):
            self.streamed(configs()["experts"])
        self.assertLessEqual(most, 2 * 4)  # the two projections of four experts make one parameter
        self.assertIs(write, tandem.OffloadEngine.write)

    def refuses(self, text, config="tied", error=tandem.InputError):
        with self.assertRaisesRegex(error, text) as caught:
            self.streamed(configs()[config])
        self.assertNotIn("\n", str(caught.exception))

    def test_folders_that_will_not_do(self):
        self.refuses("has no model.safetensors")
        self.saved(configs()["tied"])
        file = self.folder / "model.safetensors"
        whole = load_file(file)
        save_file({k: v for k, v in whole.items() if k != "model.layers.1.mlp.up_proj.weight"}, file)
        self.refuses("has no weights for model.layers.1.mlp.up_proj.weight")
        save_file({**whole, "model.norm.weight": torch.zeros(31).bfloat16()}, file)
        self.refuses("'model.norm.weight' is of shape \\(31,\\) in the files, and of \\(32,\\)")
        file.write_bytes(file.read_bytes()[:100])
        self.refuses("model.safetensors: ")
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
        self.refuses("has no part.safetensors")
        (self.folder / "model.safetensors.index.json").write_text("[]")
        self.refuses("no index of safetensors")

    def test_older_versions_of_transformers(self):
        self.saved(configs()["tied"])
        with unittest.mock.patch.dict(sys.modules, {"transformers.conversion_mapping": None}):
            self.refuses("install transformers 5.1 or later", error=tandem.UsageError)

    def test_without_source(self):
        with tandem.empty_parameters():
            model = model_of(configs()["tied"])
        with self.assertRaisesRegex(tandem.MisuseError, "load its weights first"):
            tandem.stream(model, device="host", device_memory="1MiB")


if __name__ == "__main__":
    unittest.main()
