"""Parts that the tests of `tandem sample` share: a small model with a tokenizer of its own."""
import json
import pathlib
import struct
import sys

CLI = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CLI), str(CLI / "prepare")]
from program import SMALL, ProgramTest, main  # noqa: E402, F401

VOCABULARY = 512
HOST = SMALL[:4]


class SampleTest(ProgramTest):
    def folder(self, **config):
        """A Hugging Face folder of a Llama that was trained for two steps on random ids, without a tokenizer."""
        shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 48,
                 "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
                 "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": None, **config}
        ids = [(i * i * 31 + 7 * i) % shape["vocab_size"] for i in range(200)]
        data = self.file("ids.bin", struct.pack(f"<{len(ids)}H", *ids))
        run, out = self.root / "text-run", self.root / "text-model"
        self.succeed(self.run_program("train", "--model", self.file("shape/config.json", json.dumps(shape)), "--data", data,
                                      *SMALL, "--steps", "2", "--out", run))
        self.succeed(self.run_program("export", run, "--to", out, "--dtype", "fp32"))
        return out

    def text_folder(self, tokenizer, template=None, **config):
        """Folder of the small model, with a tokenizer of the package `tokenizers`."""
        out = self.folder(**config)
        tokenizer.save(str(out / "tokenizer.json"))
        (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        if template:
            (out / "chat_template.jinja").write_text(template)
        return out

    def sample(self, model, *arguments):
        return self.run_program("sample", "--model", model, *HOST, *arguments)

    def json_of(self, model, *arguments):
        return json.loads(self.succeed(self.sample(model, *arguments, "--json")).stdout)
