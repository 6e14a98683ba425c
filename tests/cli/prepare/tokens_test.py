"""Tokens of texts and prompts: those of the tokenizer itself as transformers calls it, its end token, and targets by
character offsets with every kind of tokenizer."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2", "transformers")

import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402

from common import TOOL, PrepareTest, byte_level, first, main, sentencepiece, unigram, word_piece  # noqa: E402

TEXTS = ["Hello how are you?", " What\n\n is  it? ", "caf\u00e9 \U0001f600 \ufb01ne na\u00efve", "<table> yes<|x|>no</table>", "\n",
         "def f(x):\n    return x + 1\n"]
TOKENIZERS = {
    "byte-level": lambda: byte_level("<|endoftext|>", "<|x|>"),
    "byte-level, beginning": lambda: byte_level("<|begin|>", "<|endoftext|>", "<|x|>", before="<|begin|>"),
    "prepend": lambda: sentencepiece("<|x|>", before="<s>"),
    "metaspace always": lambda: sentencepiece("<|x|>", scheme="always", before="<s>"),
    "metaspace first": lambda: sentencepiece("<|x|>", scheme="first"),
    "unigram": lambda: unigram("<|x|>"),
    "word piece": lambda: word_piece("[CLS]", "[SEP]", "<|x|>"),
}


def with_special_tokens(name):
    made = TOKENIZERS[name]()
    if name == "word piece":
        made.post_processor = first(made, "[CLS]", "[SEP]")
    return made


class Tokens(PrepareTest):
    def test_texts_get_the_special_tokens_of_the_tokenizer(self):
        for name in TOKENIZERS:
            self.tokenizer(with_special_tokens(name))
            pipeline, reference = self.pipeline(no_end_token=True), self.transformers()
            bare = self.pipeline(no_end_token=True, special_tokens=False)
            for text in TEXTS:
                with self.subTest(name, text=text):
                    self.assertEqual(pipeline.prepare({"text": text}, "r").encoded.ids, reference(text)["input_ids"])
                    self.assertEqual(bare.prepare({"text": text}, "r").encoded.ids,
                                     reference(text, add_special_tokens=False)["input_ids"])
                    for at in range(0, len(text) + 1, 3):
                        encoded = pipeline.prepare({"prompt": text[:at], "completion": text[at:]}, "r").encoded
                        self.assertEqual(encoded.ids, reference(text)["input_ids"])

    def test_targets_are_the_tokens_that_overlap_a_completion(self):
        """A completion may begin at each place in a text: no token before it is learnt, each behind it is, and of a
        character that is cut in several tokens all are."""
        for name in TOKENIZERS:
            self.tokenizer(TOKENIZERS[name]())
            pipeline = self.pipeline(no_end_token=True, special_tokens=False)
            for text in TEXTS:
                for at in range(len(text)):
                    with self.subTest(name, text=text, at=at):
                        encoded = pipeline.prepare({"prompt": text[:at], "completion": text[at:]}, "r").encoded
                        for i, (begin, end), learnt in zip(encoded.ids, encoded.offsets, encoded.mask):
                            token = pipeline.tokenizer.id_to_token(i)
                            self.assertEqual(learnt, int(end > at), (token, begin, end))
                        self.assertEqual(encoded.mask, sorted(encoded.mask))

    def test_settings_of_a_class_go_before_those_of_the_tokenizer(self):
        """Classes of transformers set some settings of tokenizer.json anew, others none; ids are those of transformers."""
        from tokenizers import normalizers, pre_tokenizers
        texts = [*TEXTS, "CAF\u00c9 \u4f60\u597d\u4e16", "Hello"]

        def byte_levels():
            for space in (False, True):
                made = byte_level("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>")
                made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
                yield made, {"add_prefix_space": space}, [{}, {"add_prefix_space": True}, {"add_prefix_space": False}]

        def word_pieces():
            for lower, strip, chinese in ((True, None, True), (False, True, False), (True, False, True)):
                made = word_piece("[CLS]", "[SEP]", "[PAD]", "[MASK]")
                made.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=strip, handle_chinese_chars=chinese)
                yield made, {"do_lower_case": lower, "strip_accents": lower if strip is None else strip,
                             "tokenize_chinese_chars": chinese}, [
                    {}, {"do_lower_case": False}, {"do_lower_case": True, "strip_accents": False}, {"strip_accents": True},
                    {"tokenize_chinese_chars": False, "strip_accents": None}]

        changed = 0
        for families, classes in ((byte_levels, ("GPT2TokenizerFast", "GPT2Tokenizer", "RobertaTokenizerFast", "GPTNeoXTokenizerFast",
                                                 "WhisperTokenizer", "PreTrainedTokenizerFast")),
                                  (word_pieces, ("BertTokenizerFast", "DistilBertTokenizer", "MPNetTokenizer", "ElectraTokenizerFast",
                                                 "PreTrainedTokenizerFast"))):
            for made, own, configs in families():
                for name in classes:
                    for config in configs:
                        self.tokenizer(made, tokenizer_class=name, **config)
                        pipeline, reference = self.pipeline(no_end_token=True, special_tokens=False), self.transformers()
                        with self.subTest(name, own=own, config=config):
                            for text in texts:
                                self.assertEqual(pipeline.prepare({"text": text}, "r").encoded.ids,
                                                 reference(text, add_special_tokens=False)["input_ids"])
                            self.assertEqual([(s, b) for s, _, b in pipeline.overridden],
                                             [(s, own[s]) for s, value, _ in pipeline.overridden if value != own[s]])
                            changed += bool(pipeline.overridden)
        self.assertGreater(changed, 20)
        self.tokenizer(byte_level("<|endoftext|>"), tokenizer_class="GPT2TokenizerFast", add_prefix_space=True)
        result = self.succeed(self.prepare(self.file("a.txt", "Hello")))
        self.assertIn(f"{self.model}/tokenizer.json has false for add_prefix_space, and tokenizer_config.json with its tokenizer_class "
                      "true, which is taken, as in transformers\n", result.stderr)
        self.file("model/tokenizer_config.json", json.dumps({"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": "yes"}))
        self.out.unlink()
        self.refused(self.prepare(self.root / "a.txt"), "tokenizer_config.json: add_prefix_space: true or false was expected")

    def test_a_token_across_the_border_is_a_target_and_is_not_cut(self):
        self.tokenizer(byte_level("<|endoftext|>"))
        pipeline = self.pipeline()
        whole = pipeline.prepare({"text": "Hello how"}, "r").encoded.ids
        for prompt in ("Hel", "Hello", "Hello "):
            encoded = pipeline.prepare({"prompt": prompt, "completion": "Hello how"[len(prompt):]}, "r").encoded
            self.assertEqual(encoded.ids, whole)
            across = prompt != "Hello"
            token = next(i for i, (b, e) in enumerate(encoded.offsets) if b <= len(prompt) < e)
            self.assertEqual(encoded.mask, [0] * token + [1] * (len(whole) - token))
            self.assertEqual(encoded.offsets[token][0] < len(prompt), across)

    def test_a_token_without_characters_belongs_to_what_follows(self):
        from preparation.tokens import mask_of
        offsets = [(0, 3), (3, 3), (3, 5), (5, 5), (5, 6)]
        self.assertEqual(mask_of(offsets, [(3, 5)]), [0, 1, 1, 0, 0])
        self.assertEqual(mask_of(offsets, [(3, 5)], strict=True), [0, 0, 1, 0, 0])  # the rule of transformers
        self.assertEqual(mask_of(offsets, [(0, 1), (4, 6)]), [1, 0, 1, 1, 1])
        self.assertEqual(mask_of([(0, 1), (0, 1), (1, 2)], [(0, 1)]), [1, 1, 0])
        self.assertEqual(mask_of(offsets, []), [0] * 5)

    def test_the_end_token_comes_from_the_best_place(self):
        made = byte_level("<|endoftext|>", "<|a|>", "<|b|>", "<|c|>", "<|d|>")
        c, d = made.token_to_id("<|c|>"), made.token_to_id("<|d|>")
        cases = [  # files of the folder, flags, end token, where it stands
            ({"tokenizer_config.json": {"eos_token": "<|a|>"}, "special_tokens_map.json": {"eos_token": "<|b|>"}}, [], "<|a|>",
             "eos_token of model/tokenizer_config.json"),
            ({"tokenizer_config.json": {"eos_token": {"content": "<|a|>"}}}, [], "<|a|>", "eos_token of model/tokenizer_config.json"),
            ({"special_tokens_map.json": {"eos_token": {"content": "<|b|>"}}, "config.json": {"eos_token_id": c}}, [], "<|b|>",
             "eos_token of model/special_tokens_map.json"),
            ({"generation_config.json": {"eos_token_id": [c, d]}, "config.json": {"eos_token_id": d}}, [], "<|c|>",
             "eos_token_id of model/generation_config.json"),
            ({"config.json": {"text_config": {"eos_token_id": d}}}, [], "<|d|>", "eos_token_id of model/config.json"),
            ({"config.json": {"eos_token_id": 999999}}, [], "<|endoftext|>", "its usual name"),
            ({"tokenizer_config.json": {"eos_token": None}}, [], "<|endoftext|>", "its usual name"),
            ({"tokenizer_config.json": {"eos_token": "<|a|>"}}, ["--end-token", "<|d|>"], "<|d|>", "--end-token"),
        ]
        text = self.file("a.txt", "a")
        for files, flags, token, source in cases:
            with self.subTest(files=files, flags=flags):
                self.tokenizer(made)
                for name, content in files.items():
                    self.file(f"model/{name}", json.dumps(content))
                result = self.succeed(self.prepare(*flags, "--show", "0", text, tokenizer="model"))
                identity = made.token_to_id(token)
                self.assertIn(f"end token {token!r} (id {identity}): {source}", result.stdout)
                self.assertEqual(self.written()[0][-1], identity)
                self.assertEqual(self.written()[2]["end_token"], identity)
                self.assertEqual(result.stderr.count("no end token"), 0)

    def test_no_end_token_is_told(self):
        self.tokenizer(byte_level())
        text = self.file("a.txt", "ab")
        result = self.succeed(self.prepare(text))
        self.assertIn("no end token: the tokenizer's folder names none", result.stderr)
        self.assertEqual(self.written()[2]["end_token"], None)
        self.assertEqual(self.succeed(self.prepare("--no-end-token", text)).stderr.count("no end token"), 0)
        for path in self.root.glob("out.*"):
            path.unlink()
        self.tokenizer(byte_level(), eos_token="</s>")
        self.refused(self.prepare(text), "eos_token of", "tokenizer_config.json: '</s>' is no token of tokenizer.json", "--end-token")
        self.succeed(self.prepare("--no-end-token", text))

    def test_tokens_are_not_written_twice(self):
        made = byte_level("<|begin|>", "<|endoftext|>")
        made.post_processor = first(made, "<|begin|>", "<|endoftext|>")
        self.tokenizer(made, eos_token="<|endoftext|>")
        begin, end = made.token_to_id("<|begin|>"), made.token_to_id("<|endoftext|>")
        inner = made.encode("ab", add_special_tokens=False).ids
        self.assertEqual(self.encode({"text": "ab"}), ([begin, *inner, end], [1] * (len(inner) + 2)))
        self.assertEqual(self.encode({"text": "<|begin|>ab"})[0], [begin, *inner, end])
        made.post_processor = first(made, "<|begin|>")
        self.tokenizer(made, eos_token="<|endoftext|>")
        self.assertEqual(self.encode({"text": "ab"})[0], [begin, *inner, end])
        self.assertEqual(self.encode({"text": "ab<|endoftext|>"})[0], [begin, *inner, end])
        self.assertEqual(self.encode({"text": "ab"}, special_tokens=False)[0], [*inner, end])
        self.assertEqual(self.encode({"prompt": "ab", "completion": "ab"})[1], [0] + [0] * len(inner) + [1] * len(inner) + [1])
        # An answer that says nothing is learnt by its end; a chat that ends with a question is not.
        self.assertEqual(self.encode({"prompt": "ab", "completion": ""})[1], [0] + [0] * len(inner) + [1])
        self.assertEqual(sum(self.encode({"messages": [{"role": "user", "content": "ab"}]})[1]), 0)
        result = self.succeed(self.prepare(self.file("a.txt", "<|begin|>ab")))
        self.assertIn("1 texts begin with the tokenizer's beginning token: it is not written twice", result.stderr)

    def test_special_tokens_of_other_files_are_added_as_transformers_adds_them(self):
        made = byte_level("<|endoftext|>", "<|x|>")
        self.tokenizer(made, eos_token="<|endoftext|>", pad_token="<|pad|>", additional_special_tokens=["<|y|>"], added_tokens_decoder={
            "401": {"content": "<|x|>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": True}})
        reference = self.transformers()
        for text in ("a <|x|> b<|pad|>c", "a<|y|>b", "plain"):
            self.assertEqual(self.encode({"text": text}, no_end_token=True)[0], reference(text)["input_ids"], text)
        size = made.get_vocab_size()
        plain, new = self.file("a.txt", "plain"), self.file("b.txt", "a<|pad|>")
        self.assertEqual(self.succeed(self.prepare(plain)).stderr.count("ids beyond"), 0)
        self.assertEqual(self.written()[2]["vocab_size"], size)
        self.assertIn("ids beyond tokenizer.json, as transformers gives them: <|pad|>", self.succeed(self.prepare(new)).stderr)
        self.assertEqual(self.written()[2]["vocab_size"], size + 1)

    def test_a_chat_gets_no_token_but_its_template_s(self):
        self.tokenizer(byte_level("<|begin|>", "<|endoftext|>", before="<|begin|>"),
                       "{% for m in messages %}[{{ m.role }}]{{ m.content }}!{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
                       eos_token="<|endoftext|>")
        chat = self.records({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]})
        self.succeed(self.prepare(chat))
        self.assertEqual(self.text_and_targets(), ["[user]hi![assistant]yo!", "yo!"])
        (self.model / "chat_template.jinja").unlink()
        self.succeed(self.prepare(chat))
        self.assertEqual(self.text_and_targets(), ["<|begin|><|user|>\nhi\n<|assistant|>\nyo\n<|endoftext|>", "yo\n<|endoftext|>"])
        self.succeed(self.prepare("--no-special-tokens", chat))
        self.assertEqual(self.text_and_targets()[0], "<|user|>\nhi\n<|assistant|>\nyo\n<|endoftext|>")

    def test_a_text_that_the_tokenizer_cannot_encode_is_refused(self):
        from tokenizers import Tokenizer, models, pre_tokenizers
        made = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        self.tokenizer(made)
        self.refused(self.prepare(self.records({"text": "a"}, {"text": "a b"})), "data.jsonl, line 2: the tokenizer cannot encode")

    def test_texts_need_no_package_for_templates(self):
        self.tokenizer(byte_level("<|endoftext|>"), "{{ messages }}", eos_token="<|endoftext|>")
        self.file("without/jinja2.py", "raise ImportError\n")
        for record, code in (({"text": "a"}, 0), ({"messages": [{"role": "user", "content": "a"}]}, 2)):
            path = self.records(record)
            result = subprocess.run([sys.executable, TOOL, "--tokenizer", self.model, "--out", self.out, path], capture_output=True,
                                    text=True, env={**os.environ, "PYTHONPATH": str(self.root / "without")})
            self.assertEqual(result.returncode, code, result.stderr)
            self.assertEqual(result.stderr.count("-m pip install jinja2"), code // 2)

    def test_wide_vocabularies(self):
        made = byte_level("<|endoftext|>")
        made.add_tokens([f"token{i:05}" for i in range(1 << 16)])
        self.tokenizer(made, eos_token="<|endoftext|>")
        self.succeed(self.prepare(self.file("a.txt", "token65535")))
        ids, _, description = self.written()
        self.assertEqual((description["dtype"], ids), ("uint32", [made.token_to_id("token65535"), made.token_to_id("<|endoftext|>")]))


if __name__ == "__main__":
    main()
