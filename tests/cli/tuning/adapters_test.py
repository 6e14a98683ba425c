"""Adapters: read and written as PEFT has them, trained, killed, resumed and merged; and what is refused.

The adapters and the losses that they must give are PEFT's own, out of tests/models/fixtures."""
import fcntl
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from program import PROGRAM, SMALL, ProgramTest, main, wait_for  # noqa: E402

FIXTURES = pathlib.Path(__file__).parents[2] / "models" / "fixtures"
HOST = ["--device", "host", "--threads", "1"]
BARE = ["gpt2", "llama3", "qwen3", "gemma3", "qwen3_moe", "phi3", "mixtral", "olmoe", "qwen3_moe.modules", "qwen3_moe.router",
        "olmoe.router"]


def read_safetensors(path):
    """(dtype, shape, bytes) by name, and the metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    metadata = header.pop("__metadata__", {})
    return {n: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for n, t in header.items()}, metadata


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def floats(tensor):
    dtype, _, content = tensor
    if dtype == "BF16":
        content = b"".join(b"\0\0" + content[i:i + 2] for i in range(0, len(content), 2))
    return struct.unpack(f"<{len(content) // 4}f", content)


class AdapterTest(ProgramTest):
    def base(self, name="llama3"):
        """The model that the adapter of a fixture belongs to."""
        name = name.partition(".")[0]
        tensors, metadata = read_safetensors(FIXTURES / f"{name}.safetensors")
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(metadata["config"])
        names = [n for n in tensors if f"grad.{n}" in tensors]
        write_safetensors(folder / "model.safetensors", {n: tensors[n] for n in names})
        return folder

    def adapter(self, name="llama3", folder=None, **changes):
        """PEFT's adapter for it. `changes` of adapter_config.json."""
        tensors, metadata = read_safetensors(FIXTURES / "lora" / f"{name}.safetensors")
        folder = folder or self.root / f"{name}-adapter"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({**json.loads(metadata["adapter"]), **changes}))
        write_safetensors(folder / "adapter_model.safetensors",
                          {n: t for n, t in tensors.items() if n.startswith("base_model.")})
        return folder

    def stream(self, name="llama3"):
        """Flags for the text of a fixture, and its losses with and without the adapter."""
        tensors, _ = read_safetensors(FIXTURES / "lora" / f"{name}.safetensors")
        ids = struct.unpack(f"<{tensors['stream'][1][0]}i", tensors["stream"][2])
        path = self.file(f"{name}.bin", struct.pack(f"<{len(ids)}H", *ids))
        return ["--data", path, "--seq-len", tensors["tokens"][1][1]], struct.unpack("<2d", tensors["stream.losses"][2])

    def loss(self, *arguments):
        return json.loads(self.succeed(self.run_program("eval", *arguments, *HOST, "--json")).stdout)["loss"]

    def train_ids(self, *arguments):
        flags, _ = self.stream()
        return self.run_program("train", *flags, *HOST, *arguments)


class Peft(AdapterTest):
    def test_losses_are_those_of_peft(self):
        for name in BARE:
            with self.subTest(name):
                base, adapter = self.base(name), self.adapter(name)
                data, (expected, without) = self.stream(name)
                loss = self.loss("--model", base, "--adapter", adapter, *data)
                self.assertLess(abs(loss / expected - 1), 1e-5)
                self.assertLess(abs(self.loss("--model", base, *data) / without - 1), 1e-5)
                self.assertGreater(abs(without / expected - 1), 1e-3, "the adapter does too little to show anything")

    def test_what_is_taken_in_comes_out(self):
        for name in BARE:
            with self.subTest(name):
                base, adapter, out = self.base(name), self.adapter(name), self.root / f"{name}-run"
                data, (expected, _) = self.stream(name)
                self.succeed(self.run_program("train", "--model", base, "--adapter", adapter, *data, *HOST, "--steps", "1",
                                              "--lr", "0", "--out", out))
                exported = self.root / f"{name}-exported"
                self.succeed(self.run_program("export", out, "--to", exported, "--dtype", "fp32"))
                theirs, ours = (read_safetensors(f / "adapter_model.safetensors")[0] for f in (adapter, exported))
                self.assertEqual(ours, theirs)
                before, after = (json.loads((f / "adapter_config.json").read_text()) for f in (adapter, exported))
                for key in ("r", "lora_alpha", "use_rslora", "bias", "peft_type", "fan_in_fan_out", "modules_to_save"):
                    self.assertEqual(after[key], before[key], key)
                for key in ("rank_pattern", "alpha_pattern"):
                    self.assertEqual(after.get(key, {}), before[key], key)
                self.assertEqual(after["base_model_name_or_path"], str(base))
                summary = self.summary(out)
                self.assertEqual((summary["lora"]["rank"], summary["lora"]["alpha"]), (before["r"], before["lora_alpha"]))
                self.assertEqual(summary["base_format"], "bf16")
                for model in ([out], [exported], [base, "--adapter", out], [base, "--adapter", exported]):
                    self.assertLess(abs(self.loss("--model", *model, *data) / expected - 1), 1e-5)
                merged = self.root / f"{name}-merged"
                self.succeed(self.run_program("export", out, "--merged", "--to", merged, "--dtype", "fp32"))
                self.assertFalse((merged / "adapter_config.json").exists())
                tensors, _ = read_safetensors(merged / "model.safetensors")
                self.check_sum(name, tensors)

    def check_sum(self, name, merged):
        """W + scale B A of one layer, by hand."""
        if name == "olmoe":
            return self.check_experts(merged)
        if name in ("mixtral", "qwen3_moe.modules", "olmoe.router"):
            return
        base, _ = read_safetensors(FIXTURES / f"{name.partition('.')[0]}.safetensors")
        adapter, metadata = read_safetensors(FIXTURES / "lora" / f"{name}.safetensors")
        config = json.loads(metadata["adapter"])
        scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
        a_name = next(n for n in adapter if n.startswith("base_model.") and n.endswith("lora_A.weight"))
        weight = a_name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        a, b = floats(adapter[a_name]), floats(adapter[a_name.replace("lora_A", "lora_B")])
        rank, inputs = adapter[a_name][1]
        before, after, (rows, columns) = floats(base[weight]), floats(merged[weight]), base[weight][1]
        for row in range(rows):
            for column in range(columns):
                o, i = (column, row) if name == "gpt2" else (row, column)
                added = scale * sum(b[o * rank + k] * a[k * inputs + i] for k in range(rank))
                at = row * columns + column
                self.assertAlmostEqual(after[at], before[at] + added, delta=1e-5)

    def check_experts(self, merged):
        """Checks the merged weights of one expert in each of two layers."""
        base, _ = read_safetensors(FIXTURES / "olmoe.safetensors")
        adapter, _ = read_safetensors(FIXTURES / "lora" / "olmoe.safetensors")
        experts, expert = 7, 2
        for layer, name, rank, alpha, first_row in [(0, "down_proj", 3, 5, 0), (1, "gate_proj", 4, 2, 0), (1, "up_proj", 4, 2, 13)]:
            wrapper = f"base_model.model.model.layers.{layer}.mlp.experts."
            a, b = (floats(adapter[f"{wrapper}lora_{m}.weight"]) for m in "AB")
            weight = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
            before, after, (rows, columns) = floats(base[weight]), floats(merged[weight]), base[weight][1]
            for row in range(rows):
                for column in range(columns):
                    added = alpha / math.sqrt(rank) * sum(
                        b[(first_row + row) * rank * experts + k * experts + expert] * a[(expert * rank + k) * columns + column]
                        for k in range(rank))
                    at = row * columns + column
                    self.assertAlmostEqual(after[at], before[at] + added, delta=1e-5)

    def test_a_router_as_transformers_4_has_it(self):
        """A linear layer, of Mixtral with another name."""
        base, adapter = self.base("mixtral"), self.root / "router"
        data, (_, without) = self.stream("mixtral")
        self.succeed(self.run_program("train", "--model", base, *data, *HOST, "--lora-rank", "8", "--lora-targets", "gate", "--lr", "3e-1",
                                      "--steps", "20", "--out", self.root / "run"))
        self.succeed(self.run_program("export", self.root / "run", "--to", adapter, "--dtype", "fp32"))
        loss = self.loss("--model", base, "--adapter", adapter, *data)
        self.assertGreater(abs(loss / without - 1), 1e-4, "the adapter does too little to show anything")
        tensors, _ = read_safetensors(adapter / "adapter_model.safetensors")
        write_safetensors(adapter / "adapter_model.safetensors", {n.replace("mlp.gate", "block_sparse_moe.gate"): t for n, t in tensors.items()})
        described = json.loads((adapter / "adapter_config.json").read_text())
        self.assertEqual(described.pop("target_parameters"), ["mlp.gate.weight"])
        (adapter / "adapter_config.json").write_text(json.dumps({**described, "target_modules": ["gate"]}))
        self.assertEqual(self.loss("--model", base, "--adapter", adapter, *data), loss)

    def test_dropout_is_of_training_alone(self):
        """An adapter of experts' modules may have been trained with it, which is not done here."""
        name = "qwen3_moe.modules"
        base, adapter = self.base(name), self.adapter(name, lora_dropout=0.1)
        data, (expected, _) = self.stream(name)
        self.assertLess(abs(self.loss("--model", base, "--adapter", adapter, *data) / expected - 1), 1e-5)
        train = ["train", "--model", base, "--adapter", adapter, *data, *HOST, "--steps", "1"]
        self.refused(self.run_program(*train), 2, "lora_dropout 0.1", "--lora-dropout 0")
        self.succeed(self.run_program(*train, "--lora-dropout", "0"))

    def changed(self, flags, keep=None, name="llama3", **changes):
        """Loss of an adapter of the fixture whose description is changed, with those matrices alone that `keep` asks for."""
        adapter = self.adapter(name, **changes)
        if keep:
            tensors, _ = read_safetensors(adapter / "adapter_model.safetensors")
            write_safetensors(adapter / "adapter_model.safetensors", {n: t for n, t in tensors.items() if "lora_" not in n or keep(n)})
        return self.loss("--model", self.base(name), "--adapter", adapter, *flags)

    def test_ranks_alphas_and_layers_of_some_modules(self):
        flags, (expected, _) = self.stream()
        same = self.changed(flags, r=2, lora_alpha=1, rank_pattern={"no_proj": 3, r".*self_attn\..*": 5, "mlp.*": 5},
                            alpha_pattern={".*": 7})
        self.assertLess(abs(same / expected - 1), 1e-5)
        self.assertGreater(abs(self.changed(flags, alpha_pattern={"q_proj": 9}) / expected - 1), 1e-5)
        self.refused(self.run_program("eval", "--model", self.base(), "--adapter", self.adapter(rank_pattern={"q_proj": 3}),
                                      *flags), 4, "misshapen", "q_proj.lora_A")
        linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        first = self.changed(flags, lambda n: ".layers.1." not in n, target_modules=r".*\.0\..*_proj")
        self.assertGreater(abs(first / expected - 1), 1e-5)
        for changes in ({"layers_to_transform": [0]}, {"layers_to_transform": 0, "layers_pattern": "layers"},
                        {"exclude_modules": r".*\.1\..*"},
                        {"exclude_modules": [f"layers.1.{m}" for m in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")] +
                                            [f"1.self_attn.{m}" for m in linear[:4]]}):
            with self.subTest(changes):
                loss = self.changed(flags, lambda n: ".layers.1." not in n, target_modules=linear, **changes)
                self.assertEqual(loss, first)

    def test_ranks_by_module_are_gone_on_with(self):
        flags, out = self.stream("olmoe")[0], self.root / "out"
        self.succeed(self.run_program("train", "--model", self.base("olmoe"), "--adapter", self.adapter("olmoe"), *flags, *HOST,
                                      "--steps", "3", "--out", out))
        again = self.root / "again"
        self.succeed(self.run_program("train", "--model", self.base("olmoe"), "--adapter", self.adapter("olmoe"), *flags, *HOST,
                                      "--steps", "3", "--checkpoint-every", "1", "--keep", "0", "--out", again))
        self.succeed(self.run_program("train", "--resume", again, "--steps", "3"))
        self.succeed(self.run_program("train", "--resume", again / "checkpoints" / "step-00000001", "--model", self.base("olmoe"),
                                      "--adapter", self.adapter("olmoe"), *flags, *HOST, "--steps", "3", "--out", self.root / "o"))
        for folder in (again, self.root / "o"):
            self.assertEqual(self.summary(folder)["state_digest"], self.summary(out)["state_digest"])

    def test_a_folder_with_base_and_adapter(self):
        base = self.base()
        data, (expected, without) = self.stream()
        self.adapter(folder=base)
        self.assertLess(abs(self.loss("--model", base, *data) / expected - 1), 1e-5)
        self.refused(self.run_program("eval", "--model", base, "--adapter", base, *data), 2, "adapter of its own")
        alone = self.adapter(base_model_name_or_path=str(base))
        self.refused(self.run_program("export", alone, "--to", self.root / "x"), 2, "--merged")
        self.adapter(base_model_name_or_path=str(alone))
        self.refused(self.run_program("eval", "--model", alone, *data), 2, "holds an adapter itself")
        self.adapter(base_model_name_or_path=str(base))
        (base / "adapter_config.json").unlink()
        self.refused(self.run_program("eval", "--model", base, *data), 2, "adapter_config.json")
        (base / "adapter_model.safetensors").unlink()
        self.assertLess(abs(self.loss("--model", alone, *data) / expected - 1), 1e-5)
        self.assertLess(abs(self.loss("--model", base, *data) / without - 1), 1e-5)

    def test_what_is_not_done_is_refused_by_name(self):
        base = self.base()
        data, _ = self.stream()
        for changes, words in [({"use_dora": True}, ["use_dora"]), ({"peft_type": "IA3"}, ["IA3"]),
                               ({"bias": "all"}, ["bias"]), ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern of q_proj"]),
                               ({"rank_pattern": {"(q": 2}}, ["rank_pattern"]),
                               ({"alpha_pattern": {"q_proj": "x"}}, ["alpha_pattern"]),
                               ({"layers_to_transform": ["x"]}, ["layers_to_transform"]),
                               ({"layers_to_transform": 1, "target_modules": ".*proj"}, ["layers_to_transform"]),
                               ({"layers_to_transform": 1, "layers_pattern": "blocks", "target_modules": ["q_proj"]},
                                ["layers_pattern"]),
                               ({"target_parameters": ["x"]}, ["target_parameters", "no experts"]),
                               ({"init_lora_weights": "pissa"}, ["pissa"]), ({"some_new_field": 3}, ["some_new_field"]),
                               ({"target_modules": ["embed_tokens"]}, ["embed_tokens", "no linear layer"]),
                               ({"target_modules": ["q_prj"]}, ["q_prj", "q_proj"]), ({"r": 0}, ["rank", "1 to 65536"]), ({"r": 5000}, ["target_modules, rank 5000", "the smaller side"]),
                               ({"target_modules": None}, ["target_modules"])]:
            with self.subTest(changes):
                adapter = self.adapter(**changes)
                self.refused(self.run_program("eval", "--model", base, "--adapter", adapter, *data), 2, *words)

    def test_a_base_that_is_an_adapter(self):
        """One of two adapters would be left out, and one that names itself never ends."""
        base = self.base()
        data, _ = self.stream()
        first = self.adapter(base_model_name_or_path=str(base))
        second = self.adapter(folder=self.root / "second", base_model_name_or_path=str(first))
        self.refused(self.run_program("eval", "--model", second, *data), 2, str(first), "an adapter itself", "--merged")
        self.adapter(folder=second, base_model_name_or_path=str(second))
        self.refused(self.run_program("eval", "--model", second, *data), 2, str(second), "an adapter itself")
        run = self.root / "run"
        self.succeed(self.run_program("train", "--model", base, *data, *HOST, "--steps", "1", "--lora-rank", "2", "--out", run))
        self.adapter(folder=second, base_model_name_or_path=str(run))
        self.refused(self.run_program("eval", "--model", second, *data), 2, str(second), f"its base {run} holds an adapter itself",
                     f"tandem export {run} --merged")

    def test_several_adapters_in_a_folder(self):
        base, several = self.base(), self.root / "several"
        data, (expected, _) = self.stream()
        several.mkdir()
        for name in ("one", "two"):
            self.adapter(folder=several / name, base_model_name_or_path=str(base))
        for flags in (["--model", several], ["--model", base, "--adapter", several]):
            self.refused(self.run_program("eval", *flags, *data), 2, str(several), f"name one of {several / 'one'}, {several / 'two'}")
        self.assertLess(abs(self.loss("--model", several / "two", *data) / expected - 1), 1e-5)

    def test_values_that_are_not_finite_are_warned_of(self):
        base, adapter = self.base(), self.adapter()
        data, _ = self.stream()
        tensors, _ = read_safetensors(adapter / "adapter_model.safetensors")
        name = next(n for n in tensors if n.endswith("0.self_attn.q_proj.lora_A.weight"))
        dtype, shape, content = tensors[name]
        write_safetensors(adapter / "adapter_model.safetensors", {**tensors, name: (dtype, shape, struct.pack("<f", math.nan) + content[4:])})
        warned = self.succeed(self.run_program("eval", "--model", base, "--adapter", adapter, *data)).stderr
        self.assertIn(f"block.0.self_attn.q_proj.lora_A.weight: 1 of {len(content) // 4} values are NaN or infinite", warned)

    def test_an_adapter_of_another_base(self):
        base = self.base("qwen3")
        data, _ = self.stream("qwen3")
        adapter = self.adapter()
        for command, more in (("eval", data), ("plan", ["--seq-len", "16"])):
            self.refused(self.run_program(command, "--model", base, "--adapter", adapter, *more), 4, "misshapen", "lora_A")
        self.adapter(target_modules=["q_proj"])
        self.refused(self.run_program("eval", "--model", self.base(), "--adapter", adapter, *data), 4, "unexpected")
        self.adapter(r=60, rank_pattern={}, modules_to_save=None)
        line = self.refused(self.run_program("train", "--model", self.base(), "--adapter", adapter, "--lora-targets", "q_proj", *data,
                                             "--steps", "1"), 2, "rank 60", "the base that the adapter was made of")
        self.assertNotIn("--lora-rank", line)
        self.adapter(modules_to_save=["hed"])
        line = self.refused(self.run_program("eval", "--model", self.base(), "--adapter", adapter, *data), 2, "modules_to_save hed")
        self.assertNotIn("--lora", line)
        for missing in ("adapter_config.json", "adapter_model.safetensors"):
            self.adapter()
            (adapter / missing).unlink()
            self.refused(self.run_program("eval", "--model", base, "--adapter", adapter, *data), 2, missing)


class Runs(AdapterTest):
    LORA = ["--lora-rank", "4", "--lora-targets", "q_proj,v_proj,down_proj", "--lr", "1e-2"]

    def test_only_adapters_are_saved_and_any_way_gives_the_same_state(self):
        base, out, other = self.base(), self.root / "out", self.root / "other"
        self.succeed(self.train_ids("--model", base, *self.LORA, "--steps", "6", "--out", out))
        stored, _ = read_safetensors(out / "checkpoints" / "step-00000006" / "state.safetensors")
        self.assertEqual(len(stored), 3 * 2 * 3 * 2)  # master, m and v of A and B of three layers in two blocks
        self.assertTrue(all("lora_" in name for name in stored), stored.keys())
        digest = self.summary(out)["state_digest"]
        self.assertEqual(self.run_program("digest", out).stdout.strip(), digest)
        self.assertEqual(self.summary(out)["lora"],
                         {"rank": 4, "alpha": 8.0, "targets": ["down_proj", "q_proj", "v_proj"]})
        self.succeed(self.train_ids("--model", base, *self.LORA, "--steps", "6", "--out", other, "--policy", "stream",
                                    "--checkpoint-every", "2", "--keep", "0"))
        self.assertEqual(self.summary(other)["state_digest"], digest)
        again = self.root / "again"
        self.succeed(self.train_ids("--model", base, *self.LORA, "--steps", "6", "--out", again, "--resume",
                                    other / "checkpoints" / "step-00000002"))
        self.assertEqual(self.summary(again)["state_digest"], digest)
        self.assertEqual(self.summary(again)["resumed_from_step"], 2)
        first, last = (self.summary(out)[key] for key in ("first_loss", "final_loss"))
        self.assertLess(last, first)

    def test_a_run_that_goes_on_keeps_its_adapter(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--lora-rank", "2", "--out", out))
        for more, words in [(["--adapter", self.adapter()], ["--adapter", "its own"]), (["--lora-dropout", "0.5"], ["--lora-dropout 0"])]:
            refused = self.run_program("train", "--resume", out, "--steps", "2", *more)
            self.assertIn(refused.returncode, (2, 4), refused.stderr)
            for word in words:
                self.assertIn(word, refused.stderr)

    def test_experts_give_the_same_state_any_way(self):
        """Under any policy and number of ranks, and after a kill."""
        for name, flags in [("mixtral", ["--lora-experts", "all"]), ("qwen3_moe", ["--lora-targets", "v_proj,gate_proj,up_proj,down_proj"]),
                            ("phi3", [])]:
            with self.subTest(name):
                base = self.base(name)
                train = ["train", "--model", base, *self.stream(name)[0], "--threads", "1", "--lora-rank", "4", *flags, "--lr",
                         "1e-2", "--steps", "40", "--grad-accum", "2"]
                digests = []
                for i, (device, *more) in enumerate([["host"], ["host", "--policy", "stream"], ["host,host"],
                                                     ["host", "--policy", "host", "--recompute", "block"]]):
                    out = self.root / f"{name}-{i}"
                    self.succeed(self.run_program(*train, "--device", device, *more, "--out", out))
                    digests.append(self.summary(out)["state_digest"])
                killed = self.root / f"{name}-killed"
                with subprocess.Popen([PROGRAM, *map(str, train), "--device", "host", "--checkpoint-every", "1", "--out",
                                       str(killed)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
                    wait_for(lambda: list(killed.glob("checkpoints/step-*")))
                    process.kill()
                self.assertNotEqual(process.returncode, 0, "it ended before it could be killed")
                self.succeed(self.run_program("train", "--resume", killed))
                self.assertIsNotNone(self.summary(killed)["resumed_from_step"])
                self.assertEqual({*digests, self.summary(killed)["state_digest"]}, {digests[0]})

    def test_flags_of_experts(self):
        base, flags = self.base("mixtral"), self.stream("mixtral")[0]
        for more, words in [(["--lora-experts", "w1"], ["--lora-experts", "w1", "mlp.experts.gate_up_proj"]),
                            (["--lora-experts", "all", "--lora-dropout", "0.1"], ["--lora-dropout", "experts"]),
                            (["--lora-experts", "all", "--lora-targets", "w2"], ["--lora-experts all", "once"]),
                            (["--lora-targets", r".*experts\.0\..*"], ["1 of 3 experts"]),
                            (["--lora-targets", "w1,w3"], ["experts of block 0", "all three"]),
                            (["--lora-modules-to-save", "gate"], ["--lora-modules-to-save gate"]),
                            (["--lora-targets", "none"], ["none", "--lora-experts"]),
                            (["--lora-targets", "none", "--lora-experts", "all", "--lora-rank", "30"], ["--lora-experts"])]:
            with self.subTest(more):
                self.refused(self.run_program("train", "--model", base, *flags, *HOST, "--steps", "1", "--lora-rank", "2", *more), 2,
                             *words)
        self.refused(self.train("--steps", "1", "--lora-experts", "all"), 2, "--lora-experts", "--lora-rank")
        self.refused(self.train("--steps", "1", "--lora-rank", "2", "--lora-experts", "all"), 2, "has no experts")
        plans = [json.loads(self.succeed(self.run_program("plan", "--model", base, "--seq-len", "8", *HOST, "--lora-rank", "2", *more,
                                                          "--json")).stdout) for more in ([], ["--lora-experts", "all"])]
        # Five matrices in each of two blocks, in units of 1,024: weights in 2 bytes, master and moments in 12.
        entries = [{e["name"]: e["bytes"] for e in plan["entries"]} for plan in plans]
        added = {name: entries[1][name] - entries[0].get(name, 0) for name in entries[1]}
        self.assertEqual(sum(n for name, n in added.items() if "weights" in name), 5 * 2 * 1024 * 2, added)

    def test_over_random_weights_of_a_built_in_shape(self):
        out, work = self.root / "out", ["--data", self.text, "--seq-len", "32"]
        self.succeed(self.run_program("train", "--model", "tiny-llama", *work, *HOST, *self.LORA, "--steps", "2", "--seed", "7",
                                      "--eval-data", self.text, "--eval-every", "2", "--out", out))
        self.assertAlmostEqual(self.loss("--model", out, *work), self.summary(out)["eval_loss"], places=5)
        self.succeed(self.run_program("export", out, "--merged", "--to", self.root / "merged"))
        self.assertAlmostEqual(self.loss("--model", self.root / "merged", *work), self.summary(out)["eval_loss"], places=2)

    def test_another_base_is_refused_by_name(self):
        base, out = self.base(), self.root / "out"
        self.succeed(self.train_ids("--model", base, *self.LORA, "--steps", "1", "--out", out))
        tensors, _ = read_safetensors(base / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        dtype, shape, content = tensors[name]
        write_safetensors(base / "model.safetensors",
                          {**tensors, name: (dtype, shape, bytes([content[0] ^ 1]) + content[1:])})
        changed = "block.1.mlp.up_proj.weight"
        self.refused(self.train_ids("--resume", out, "--steps", "2"), 4, changed, "base has changed")
        data, _ = self.stream()
        self.refused(self.run_program("eval", "--model", out, *data, *HOST), 4, changed)
        self.refused(self.run_program("export", out, "--merged", "--to", self.root / "merged"), 4, changed)
        self.assertFalse((self.root / "merged").exists())
        self.succeed(self.run_program("export", out, "--to", self.root / "adapter"))
        (base / "model.safetensors").unlink()
        base.rename(self.root / "moved")
        self.refused(self.run_program("eval", "--model", out, *data, *HOST), 2, str(base), f"tandem eval {out} --model DIR")
        self.refused(self.run_program("train", "--model", out, *data, "--steps", "1"), 2, str(base), "--model DIR", f"--adapter {out}")

    def test_a_run_over_another_base_is_found_before_the_plan(self):
        """A model of the same shapes and other values: one matrix tells, before anything is planned or measured."""
        base, out = self.base(), self.root / "out"
        self.succeed(self.train_ids("--model", base, *self.LORA, "--steps", "1", "--out", out))
        tensors, _ = read_safetensors(base / "model.safetensors")
        write_safetensors(base / "model.safetensors", {n: (d, s, bytes([c[0] ^ 1]) + c[1:]) for n, (d, s, c) in tensors.items()})
        for done in (self.train_ids("--model", base, "--adapter", out, "--steps", "1"),
                     self.run_program("plan", "--model", base, "--adapter", out, "--seq-len", "16", *HOST)):
            self.refused(done, 4, "base has changed", "block.0.")
            self.assertEqual(done.stdout, "")

    def test_a_base_that_has_moved(self):
        base, out, moved = self.base(), self.root / "out", self.root / "moved"
        data, _ = self.stream()
        self.file("rows.json", json.dumps({"dtype": "uint16", "layout": "rows", "row_length": 9}))
        self.file("rows.mask.bin", bytes([0] + [1] * 8) * 4)
        rows = ["--data", self.file("rows.bin", struct.pack("<36H", *range(36)))]
        self.succeed(self.train_ids("--model", base, *self.LORA, "--steps", "1", "--out", out))
        loss = self.loss("--model", out, *data)
        base.rename(moved)
        commands = [["eval", *data, *HOST], ["sample", "--prompt-ids", "1", *HOST], ["score", *rows, *HOST],
                    ["export", "--merged", "--to", self.root / "merged"]]
        for command, *flags in commands:
            self.refused(self.run_program(command, out, *flags), 2, str(base), f"tandem {command} {out} --model DIR")
            self.succeed(self.run_program(command, out, "--model", moved, *flags))
        self.refused(self.run_program("train", "--resume", out, "--steps", "2"), 2, str(base), "--model DIR")
        self.assertEqual(self.loss(out, "--model", moved, *data), loss)
        self.succeed(self.run_program("export", out, "--model", moved, "--to", self.root / "adapter"))
        described = json.loads((self.root / "adapter" / "adapter_config.json").read_text())
        self.assertEqual(described["base_model_name_or_path"], str(moved))
        self.refused(self.run_program("eval", moved, "--model", base, *data), 2, f"--model {base}", "whole model")
        self.refused(self.run_program("eval", out, "--model", self.root / "movd", *data), 2, "movd", f"perhaps {moved}")
        adapter = self.adapter(base_model_name_or_path=None)
        self.refused(self.run_program("eval", adapter, *data), 2, "does not name its base", f"tandem eval {adapter} --model DIR")
        self.loss(adapter, "--model", moved, *data)
        self.refuse_others(out, data, moved)
        self.succeed(self.run_program("train", "--resume", out, "--model", moved, "--steps", "2"))
        self.succeed(self.run_program("train", "--resume", out, "--steps", "3"))  # it is known by now
        self.loss("--model", out, *data)

    def refuse_others(self, out, data, base):
        """A base of other values, or of another shape, is none."""
        tensors, _ = read_safetensors(base / "model.safetensors")
        name, other = "model.layers.1.mlp.up_proj.weight", self.root / "other"
        other.mkdir()
        (other / "config.json").write_bytes((base / "config.json").read_bytes())
        dtype, shape, content = tensors[name]
        write_safetensors(other / "model.safetensors", {**tensors, name: (dtype, shape, bytes([content[0] ^ 1]) + content[1:])})
        for command in (["eval", out, *data], ["export", out, "--merged", "--to", self.root / "x"],
                        ["export", out, "--to", self.root / "x"], ["train", "--resume", out, "--steps", "2"]):
            self.refused(self.run_program(*command, "--model", other), 4, "block.1.mlp.up_proj.weight", "base has changed")
            self.refused(self.run_program(*command, "--model", self.base("qwen3")), 4)
        self.assertFalse((self.root / "x").exists())

    def test_a_model_behind_data(self):
        """--data takes all words that follow, so a run behind it is no word of its own."""
        out, (data, _) = self.root / "out", self.stream()
        self.succeed(self.train_ids("--model", self.base(), *self.LORA, "--steps", "1", "--out", out))
        line = self.refused(self.run_program("eval", *data[:2], out, *data[2:]), 2, f"{out} is read as more of --data", f"eval {out} --data")
        self.succeed(self.run_program("eval", out, *data))
        self.assertNotIn("runs/first", line)

    def test_two_exports_to_one_folder(self):
        out, to, hidden = self.root / "out", self.root / "to", self.root / ".to.tmp"
        self.succeed(self.train("--steps", "1", "--lora-rank", "2", "--out", out))
        hidden.mkdir()
        (hidden / "left.safetensors").write_text("by one that was killed")
        held = os.open(hidden, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        self.refused(self.run_program("export", out, "--merged", "--to", to), 7, str(to), "another export is writing it")
        self.assertFalse(to.exists())
        os.close(held)
        both = [subprocess.Popen([PROGRAM, "export", str(out), *flags, "--to", str(to)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                for flags in ([], ["--merged"])]
        self.assertEqual(sorted(process.wait() for process in both), [0, 7])
        self.assertFalse(hidden.exists())
        merged = both[1].returncode == 0
        self.assertEqual((to / "adapter_config.json").exists(), not merged)
        self.assertEqual((to / "model.safetensors").exists(), merged)
        self.assertFalse((to / "left.safetensors").exists())

    def test_a_run_that_is_not_there(self):
        runs = self.root / "runs"
        self.succeed(self.train("--steps", "1", "--lora-rank", "2", "--out", runs / "lora"))
        typed = runs / "lor"
        for command in (["export", typed, "--to", self.root / "x"], ["eval", "--model", typed, "--data", self.text],
                        ["eval", "--model", self.base(), "--adapter", typed, "--data", self.text]):
            self.refused(self.run_program(*command), 2, str(typed), "there is no such", f"perhaps {runs / 'lora'}")
        hub = self.run_program("export", "runs/lor", "--to", "x", cwd=self.root)  # a name of the hub by its form
        self.refused(hub, 2, "perhaps runs/lora", "hf download")

    def test_resuming_with_other_adapters_is_refused(self):
        base, out = self.base(), self.root / "out"
        self.succeed(self.train_ids("--model", base, *self.LORA, "--steps", "1", "--out", out))
        for flags, words in [(["--lora-rank", "3"], ["--lora-rank 4"]), (["--lora-alpha", "3"], ["--lora-alpha"]),
                             (["--lora-rslora"], ["--lora-rslora"]),
                             (["--lora-targets", "q_proj"], ["--lora-targets down_proj,q_proj,v_proj", "this run has q_proj"]),
                             (["--lora-modules-to-save", "lm_head"], ["--lora-modules-to-save none", "trains lm_head whole"])]:
            self.refused(self.train_ids("--resume", out, "--steps", "2", *flags), 4, "leave the flag out", *words)
        self.succeed(self.train_ids("--resume", out, "--steps", "2", "--lora-targets", " v_proj , q_proj,down_proj"))

    def test_going_on_from_an_adapter(self):
        base, adapter, out = self.base(), self.adapter(), self.root / "out"
        for flags, words in [(["--lora-rank", "7"], ["--lora-rank 7", "5"]), (["--lora-alpha", "1"], ["7"]),
                             (["--lora-targets", "q_proj"], ["--lora-targets"]), (["--lora-rslora"], ["--lora-rslora"]),
                             (["--lora-modules-to-save", "lm_head"], ["lm_head,norm"])]:
            self.refused(self.train_ids("--model", base, "--adapter", adapter, *flags, "--steps", "1"), 2, *words)
        self.succeed(self.train_ids("--model", base, "--adapter", adapter, "--lora-rank", "5", "--steps", "1", "--out", out))
        (adapter / "adapter_model.safetensors").unlink()  # its values are the run's by now
        self.succeed(self.train_ids("--resume", out, "--steps", "2"))
        trained, _ = read_safetensors(out / "checkpoints" / "step-00000002" / "state.safetensors")
        self.assertIn("master.head.lm_head", trained)
        self.assertNotIn("master.embedding.tokens", trained)

    def test_flags_that_make_no_sense(self):
        for flags, words in [(["--lora-alpha", "3"], ["--lora-alpha", "--lora-rank"]),
                             (["--lora-targets", "q_proj"], ["--lora-targets", "--lora-rank"]),
                             (["--lora-rank", "0"], ["--lora-rank"]), (["--lora-rank", "999"], ["--lora-rank 999"]),
                             (["--lora-rank", "2", "--lora-targets", "c_atn"], ["c_atn", "perhaps c_attn"]),
                             (["--lora-rank", "2", "--lora-targets", "wte"], ["wte", "--lora-modules-to-save"]),
                             (["--lora-rank", "2", "--lora-targets", "attn.*"], ["attn.*", "transformer.h."]),
                             (["--lora-rank", "2", "--lora-targets", "(c_attn"], ["--lora-targets"]),
                             (["--lora-rank", "2", "--lora-targets", ""], ["--lora-targets: ''"]),
                             (["--lora-rank", "2", "--lora-targets", "c_attn, ,c_proj"], ["--lora-targets: ", "a name is missing"]),
                             (["--lora-rank", "2", "--lora-modules-to-save", "wte,"], ["--lora-modules-to-save", "a name is missing"]),
                             (["--lora-rank", "2", "--lora-targets", ".*c_attn", "--freeze", "wte"], ["--freeze"]),
                             (["--lora-rank", "2", "--lora-modules-to-save", "hed"], ["hed"]),
                             (["--lora-rank", "2", "--lora-dropout", "1"], ["--lora-dropout"]),
                             (["--base", "nf4"], ["--base", "--lora-rank"]), (["--base", "nf3"], ["nf4-double"]),
                             (["--adapter", self.root / "none"], ["--adapter", "no such folder"])]:
            with self.subTest(flags):
                out = self.root / "out"
                self.refused(self.train("--steps", "1", "--out", out, *flags), 2, *words)
                self.assertFalse(out.exists())

    def test_plan_and_bench_take_the_same_flags(self):
        lora = ["--lora-rank", "4", "--lora-targets", r".*\.0\.attn\.c_attn"]
        plans = [json.loads(self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, *flags, "--json")).stdout)
                 for flags in ([], lora)]
        self.assertLess(plans[1]["host_bytes"] + plans[1]["device_bytes"], plans[0]["host_bytes"] + plans[0]["device_bytes"])
        self.succeed(self.run_program("bench", "--model", "tiny-gpt2", *SMALL, *lora, "--steps", "1", "--policies", "host",
                                      "stream"))

    def test_a_checkpoint_of_adapters_is_no_state_of_the_whole_model(self):
        out = self.root / "out"
        self.succeed(self.train("--steps", "1", "--out", out, "--lora-rank", "2"))
        self.refused(self.train("--steps", "2", "--out", self.root / "o", "--resume",
                                out / "checkpoints" / "step-00000001"), 4, "adapters")


if __name__ == "__main__":
    main()
