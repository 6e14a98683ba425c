"""Each file of a model's folder is opened once in a command, and so parsed once: what it holds is handed on."""
import collections
import json
import os
import pathlib
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import PROGRAM, SMALL, ProgramTest, main  # noqa: E402

NOTING = sys.argv.pop(1)  # the library of note_opens.cpp
SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 48,
         "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
HOST = SMALL[:4]


class Opens(ProgramTest):
    def setUp(self):
        super().setUp()
        self.data = self.file("ids.bin", struct.pack("<400H", *((i * i * 31 + 7 * i) % 512 for i in range(400))))
        self.file("ids.json", '{"dtype": "uint16"}')
        self.model = self.root / "hub/models--org--small/snapshots/1"
        run = self.root / "made"
        self.succeed(self.run_program("train", "--model", self.file("shape/config.json", json.dumps(SHAPE)), "--data", self.data, *SMALL,
                                      "--steps", "1", "--out", run))
        self.succeed(self.run_program("export", run, "--to", self.model, "--shard-size", "100KiB"))
        self.file("hub/models--org--small/refs/main", "1")
        self.shards = sorted(path.name for path in self.model.glob("*.safetensors"))
        self.assertGreater(len(self.shards), 1)

    def opened(self, *arguments):
        """How often each file of the model's folder was opened by a command, by its name."""
        log = self.root / "opened"
        log.unlink(missing_ok=True)
        result = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300, env={
            **self.environment(), "LD_PRELOAD": NOTING, "TANDEM_TEST_OPENED": str(log), "HF_HUB_CACHE": str(self.root / "hub")})
        self.succeed(result)
        paths = map(os.path.realpath, log.read_text().splitlines())
        return collections.Counter(os.path.basename(path) for path in paths if os.path.dirname(path) == str(self.model))

    def check(self, weights, *arguments):
        with self.subTest(arguments[0], arguments=arguments[1:]):
            wanted = ["config.json", "model.safetensors.index.json", *(self.shards if weights else [])]
            opened = self.opened(*arguments)
            self.assertEqual({name: opened[name] for name in wanted}, dict.fromkeys(wanted, 1))
            self.assertEqual({name: count for name, count in opened.items() if count > 1}, {})

    def test_each_file_is_opened_once(self):
        out, name = self.root / "run", 0
        train = ["--data", self.data, *SMALL, "--steps", "2"]
        for model in (self.model, "org/small"):
            name += 1
            self.check(True, "train", "--model", model, *train, "--out", f"{out}{name}")
            self.check(False, "plan", "--model", model, "--seq-len", "32", *HOST)
            self.check(True, "eval", "--model", model, "--data", self.data, "--seq-len", "32", *HOST)
            self.check(True, "sample", "--model", model, "--prompt", "5 6", "--max-tokens", "2", *HOST)
            self.check(True, "export", model, "--to", self.root / f"exported{name}")
        self.check(True, "train", "--model", self.model, "--data", self.data, "--steps", "2", "--seq-len", "32", "--grad-accum", "2",
                   "--device", "host,host", "--threads", "1")
        self.check(True, "train", "--resume", f"{out}1", "--steps", "3")


if __name__ == "__main__":
    main()
