"""Helpers of the tests of tools/prepare_data.py: running it, small tokenizers, and its outputs as text and targets.

The scripts that use it run under a Python with the packages of requirements.txt (../peers.py)."""
import json
import logging
import pathlib
import re
import shutil
import struct
import subprocess
import sys

from program import ProgramTest, main  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "prepare_data.py"
CASES = pathlib.Path(__file__).resolve().parent / "cases"
sys.path.insert(0, str(TOOL.parent))

# Training text of the tokenizers: words, markup, and characters of several bytes.
CORPUS = ["Hello how are you? I am fine, thank you.", "What is the weather in Paris today? It is sunny and 22 degrees.",
          "<table> yes no maybe </table>", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "caf\u00e9 \u00fcber na\u00efve",
          "system user assistant tool\n\n", "def f(x):\n    return x + 1\n"] * 4


def byte_level(*added, trim=True, before=None):
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it. `before`: a token that its post-processor writes first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    made = Tokenizer(models.BPE())
    made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    made.add_special_tokens(list(added))
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    if before:
        made.post_processor = processors.Sequence([made.post_processor, first(made, before)])
    return made


def first(tokenizer, before, behind=None):
    """A post-processor that writes a token before each text, and perhaps one behind it."""
    from tokenizers import processors
    names = [t for t in (before, behind) if t]
    return processors.TemplateProcessing(single=" ".join(filter(None, [before, "$A", behind])),
                                         special_tokens=[(t, tokenizer.token_to_id(t)) for t in names])


def sentencepiece(*added, scheme=None, before=None):
    """BPE with word marks and byte fallback, as Llama 2 and Gemma have it. `scheme`: of Metaspace; else the normaliser
    Prepend."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    corpus = [word for text in CORPUS for word in text.replace("\n", " ").replace("\u00e9", "e").split()]
    made.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))], show_progress=False))
    state = json.loads(made.to_str())  # bytes are tokens, but none that a text may name
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in added])
    if before:
        made.post_processor = first(made, before)
    return made


def unigram(*added):
    """Unigram with Metaspace, as T5 has it; a text ends with </s>."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\n", " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", show_progress=False,
                                                             special_tokens=["<unk>", "<s>", "</s>"]))
    made.add_special_tokens(list(added))
    made.post_processor = first(made, None, "</s>")
    return made


def word_piece(*added):
    """WordPiece with a normaliser that lowers and strips accents, as BERT has it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False))
    made.add_special_tokens(list(added))
    return made


class PrepareTest(ProgramTest):
    """`model` is the tokenizer's folder of a test."""

    def setUp(self):
        super().setUp()
        self.model, self.out = self.root / "model", self.root / "out.bin"

    def tokenizer(self, made, template=None, **config):
        """Writes the folder of a tokenizer anew: the tokenizer, its configuration and its chat template."""
        shutil.rmtree(self.model, ignore_errors=True)
        self.model.mkdir()
        made.save(str(self.model / "tokenizer.json"))
        self.file("model/tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
        if template:
            self.file("model/chat_template.jinja", template)

    def records(self, *records, name="data.jsonl"):
        return self.file(name, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))

    def prepare(self, *arguments, tokenizer=None):
        return subprocess.run([sys.executable, TOOL, "--tokenizer", tokenizer or self.model, "--workers", "1", "--out", self.out,
                               *map(str, arguments)], capture_output=True, text=True, timeout=300, cwd=self.root)

    def written(self, out=None):
        """Token ids, mask (all ones where there is none) and description."""
        out = out or self.out
        description = json.loads(out.with_suffix(".json").read_text())
        code, width = ("H", 2) if description["dtype"] == "uint16" else ("I", 4)
        raw, mask = out.read_bytes(), out.with_suffix(".mask.bin")
        ids = list(struct.unpack(f"<{len(raw) // width}{code}", raw))
        return ids, list(mask.read_bytes()) if mask.exists() else [1] * len(ids), description

    def text_and_targets(self, out=None):
        """Text of a byte-level tokenizer's ids: the whole, and the part that is learnt."""
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        ids, mask, _ = self.written(out)
        return [tokenizer.decode(chosen, skip_special_tokens=False)
                for chosen in (ids, [i for i, m in zip(ids, mask) if m])]

    def refused(self, result, *words, code=2):
        """One line with the code and the words, no outputs, and nothing of a stack trace."""
        self.assertEqual(result.returncode, code, result.stderr + result.stdout)
        (line,) = [line for line in result.stderr.splitlines() if not re.match(r"left out, |\d+ of \d+ parts", line)]
        self.assertTrue(line.startswith("prepare_data.py: error: "), line)
        for word in words:
            self.assertIn(word, line)
        self.assertNotIn("Traceback", result.stderr)
        self.assertFalse(self.out.exists())
        return line

    # -- in this process --

    def pipeline(self, **options):
        from preparation.pipeline import Pipeline
        return Pipeline(str(self.model), **options)

    def encode(self, record, **options):
        """Ids and mask of one record, by the package alone."""
        prepared = self.pipeline(**options).prepare(record, "record")
        return prepared.encoded.ids, prepared.encoded.mask

    def transformers(self):
        """The tokenizer of the folder as the package transformers loads it."""
        logging.getLogger("transformers").setLevel(logging.ERROR)
        from transformers import AutoTokenizer
        return AutoTokenizer.from_pretrained(self.model)
