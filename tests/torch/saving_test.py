"""save_pretrained of a streamed model: the files that transformers would write, with memory for one parameter at a time."""
import json
import pathlib
import tempfile
import tracemalloc
import unittest

from sandbox import tandem, torch

try:
    import peft
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    raise SystemExit(77) from None

from source_test import COMMON, configs, model_of
from tandem.pytorch.deferred_tensor import DeferredTensor, computed
from tandem.pytorch.live_bytes import LiveBytes
from tandem.pytorch.saving import write_safetensors

PYTHON = 1 << 20  # bytes of names and the like


def pair(config, **options):
    """A model, and the same one streamed."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(model_of(config))
    return models[0], tandem.stream(models[1], **{"device": "host", "device_memory": "4MiB", **options})


def largest(model):
    return max(p.numel() * p.element_size() for p in model.parameters())


class Saving(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def saved(self, model, name, **how):
        """Tensors by name, and names of files; peak bytes of PyTorch's tensors, and of all else, while they were written."""
        tracemalloc.start()
        with LiveBytes(torch.device("cpu")) as live:
            model.save_pretrained(self.folder / name, **how)
        others = tracemalloc.get_traced_memory()[1]  # memory of Python and NumPy
        tracemalloc.stop()
        files = sorted(self.folder.joinpath(name).glob("*.safetensors"))
        tensors = {key: value for file in files for key, value in load_file(file).items()}
        return tensors, sorted(file.name for file in self.folder.joinpath(name).iterdir()), (live.peak, others)

    def assert_same(self, mine, other):
        self.assertEqual(sorted(mine), sorted(other))
        for name, value in other.items():
            self.assertEqual(mine[name].dtype, value.dtype, name)
            self.assertTrue(torch.equal(mine[name], value), name)

    def test_files_are_those_of_transformers(self):
        for name, config in configs().items():
            for shards in ({}, {"max_shard_size": "20KB"}):
                plain, model = pair(config)
                whole, files, _ = self.saved(plain, f"{name}{len(shards)}", **shards)
                mine, mine_files, _ = self.saved(model, f"{name}{len(shards)} streamed", **shards)
                self.assert_same(mine, whole)
                if not shards:
                    self.assertEqual(mine_files, files)
                    continue
                self.assertGreater(len(mine_files), 4)
                index, other = (json.loads((self.folder / f"{name}1{end}" / "model.safetensors.index.json").read_text()) for end in (" streamed", ""))
                if name == "experts":  # transformers takes each of its parts for as large as the whole
                    self.assertEqual(sorted(index["weight_map"]), sorted(other["weight_map"]))
                else:
                    self.assertEqual((index, mine_files), (other, files))

    def test_one_parameter_at_a_time(self):
        """Parameters of experts, of which transformers makes many tensors, and resident modules are among them."""
        many = {"num_hidden_layers": 10, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 2048}
        for config in (transformers.LlamaConfig(**{**COMMON, **many}, tie_word_embeddings=True),
                       transformers.MixtralConfig(**{**COMMON, **many}, num_local_experts=4)):
            for resident in ((), ("lm_head",)):
                _, model = pair(config, resident=resident, device_memory="64MiB")
                bytes_of_all = sum(p.numel() * 2 for p in model.parameters())
                _, _, peak = self.saved(model, f"{config.model_type}{len(resident)}")
                self.assertLess(sum(peak), 2.1 * largest(model) + PYTHON)
                self.assertGreater(bytes_of_all, 2 * (2.1 * largest(model) + PYTHON))

    def test_an_adapter_alone(self):
        adapted = [peft.get_peft_model(model_of(configs()["tied"]), peft.LoraConfig(r=2, target_modules=["q_proj"])) for _ in range(2)]
        for name, parameter in adapted[1].named_parameters():
            parameter.data.copy_(adapted[0].get_parameter(name))
        model = tandem.stream(adapted[1], device="host", device_memory="4MiB")
        whole, _, _ = self.saved(adapted[0], "plain")
        mine, _, peak = self.saved(model, "streamed")
        self.assert_same(mine, whole)
        self.assertLess(peak[0], largest(model))

    def test_what_was_trained_is_saved(self):
        _, model = pair(configs()["experts"])
        optimizer = model.tandem.optimizer(lr=1e-2)
        tokens = torch.arange(20).view(2, 10)
        before, _, _ = self.saved(model, "before")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.saved(model, "after")
        again = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "after")
        for (name, mine), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
            self.assertIs(type(mine), torch.Tensor)
            self.assertTrue(torch.equal(mine, other), name)
        self.assertFalse(torch.equal(before["model.layers.0.self_attn.q_proj.weight"], again.model.layers[0].self_attn.q_proj.weight))

    def test_a_file_that_cannot_be_written(self):
        _, model = pair(configs()["tied"])
        (self.folder / "run" / "model.safetensors").mkdir(parents=True)
        with self.assertRaisesRegex(tandem.WriteError, "model.safetensors: Is a directory; ") as caught:
            model.save_pretrained(self.folder / "run")
        self.assertNotIn("\n", str(caught.exception))
        self.assertFalse([file.name for file in (self.folder / "run").iterdir() if "unfinished" in file.name])
        self.assertIs(type(model.state_dict()["model.norm.weight"]), torch.Tensor)


class Deferred(unittest.TestCase):
    def test_tensors_in_a_file_are_aligned(self):
        tensors = {"a": torch.arange(3).bfloat16(), "b": torch.arange(2.0), "c": torch.tensor(True), "d": torch.zeros(0)}
        with tempfile.TemporaryDirectory() as folder:
            write_safetensors(tensors, pathlib.Path(folder) / "file", {"format": "pt"})
            raw, read = pathlib.Path(folder, "file").read_bytes(), load_file(pathlib.Path(folder) / "file")
        for name, value in tensors.items():
            self.assertTrue(torch.equal(read[name], value) and read[name].dtype is value.dtype, name)
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:8 + size])
        self.assertEqual((size % 8, header["__metadata__"]), (0, {"format": "pt"}))
        self.assertEqual([header[name]["data_offsets"][0] % tensors[name].element_size() for name in tensors], [0, 0, 0, 0])

    def test_operations(self):
        values, reads = torch.arange(24.0).view(4, 6), []
        tensor = DeferredTensor(values.to("meta"), lambda: reads.append(1) or values)
        parts = torch.chunk(torch.cat([tensor.t(), tensor.t()], 1).to(torch.bfloat16), 2)
        self.assertEqual((reads, parts[1].shape, parts[1].dtype), ([], (3, 8), torch.bfloat16))
        expected = torch.chunk(torch.cat([values.t(), values.t()], 1).to(torch.bfloat16), 2)
        for part, other in zip(parts, expected, strict=True):
            self.assertTrue(torch.equal(computed(part), other))
        self.assertEqual(tensor[1, 2].item(), 8.0)
        self.assertTrue(torch.equal(computed(tensor.clone().cpu().contiguous()), values))
        with self.assertRaisesRegex(tandem.MisuseError, "in place"):
            tensor.mul_(2)


if __name__ == "__main__":
    unittest.main()
