"""The adapter that `tandem finetune` leaves, in PEFT and transformers: found by its folder alone, with its tokenizer, template and base, it
writes what `tandem chat` writes, and so does the whole model that it is merged into."""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PACKAGE = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, PACKAGE)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import torch  # noqa: E402
import transformers  # noqa: E402
from finetune_runs import chats, make_model  # noqa: E402

ASKED = ["what is 3?", "Well, what is 9?"]
TOKENS = 24


@unittest.skipUnless(importlib.util.find_spec("peft"), "no PEFT")
class Adapters(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tandem-finetune-")
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats(40)))

    def tandem(self, *arguments, text=None):
        environment = {**os.environ, "PYTHONPATH": PACKAGE, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, "-m", "tandem.program", *arguments], capture_output=True, text=True, input=text, env=environment,
                              cwd=self.root)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def answers_of_transformers(self, folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        answers = []
        for question in ASKED:
            inputs = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt",
                                                   return_dict=True)
            made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0][inputs["input_ids"].shape[1]:]
            answers.append(tokenizer.decode(made, skip_special_tokens=True))
        return answers

    def test_it_answers_as_tandem_chat_does(self):
        """GPT-2, whose matrices lie the other way round."""
        make_model(self.root / "model", "gpt2", spread=0.1)
        self.tandem("finetune", "model", "chats.jsonl", "--out", "run", "--device", "host", "--lora-rank", "8", "--lora-modules-to-save", "wte,lm_head",
                    "--steps", "200", "--lr", "5e-3", "--patience", "0", "--merged")
        expected = self.tandem("chat", "run/adapter", "--temperature", "0", "--max-tokens", str(TOKENS), text="\n/reset\n".join(ASKED) + "\n").splitlines()
        self.assertEqual(len(set(expected)), len(ASKED), "the answers do not depend on what is asked")
        for name in ("adapter", "model"):
            self.assertEqual(self.answers_of_transformers(self.root / "run" / name), expected, name)


if __name__ == "__main__":
    unittest.main(verbosity=1)
