"""Small inputs on which tools/prepare_data.py once learnt something else than the user meant (cases/)."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2", "transformers", "pyarrow")

import gzip  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402

from common import CASES, PrepareTest, main  # noqa: E402

DATE = "2025-01-31"


class Cases(PrepareTest):
    def folder(self, name=None):
        """Makes the tokenizer's folder of a case the test's own; without a name the plain one."""
        shutil.rmtree(self.model, ignore_errors=True)
        if name:
            shutil.copytree(CASES / name, self.model)
        self.model.mkdir(exist_ok=True)
        if not (self.model / "tokenizer.json").exists():
            shutil.copy(CASES / "plain.json", self.model / "tokenizer.json")
        config = self.model / "tokenizer_config.json"
        content = json.loads(config.read_text()) if config.exists() else {}
        config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **content}))

    def record(self, name, line=0):
        return json.loads((CASES / name).read_text().splitlines()[line])

    def learnt(self, record, **options):
        """Text that is learnt of a record, its tokens decoded; and the ids of the whole."""
        pipeline = self.pipeline(**options)
        prepared = pipeline.prepare(record, "record")
        chosen = [i for i, m in zip(prepared.encoded.ids, prepared.encoded.mask) if m]
        return pipeline.tokenizer.decode(chosen, skip_special_tokens=False), prepared

    def test_saved_truncation_and_padding_are_not_applied(self):
        plain = json.loads((CASES / "plain.json").read_text())
        text = self.file("d.txt", "Hello how are you? I am fine, thank you. What is the weather in Paris today?\n")
        found = []
        for change in ({}, {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
                       {"padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                                    "pad_type_id": 0, "pad_token": "!"}}):
            self.file("t.json", json.dumps({**plain, **change}))
            self.succeed(self.prepare(text, tokenizer=self.root / "t.json"))
            found.append(self.written())
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], found[2])
        self.assertGreater(len(found[0][0]), 8)

    def test_answers_are_learnt_whole(self):
        self.folder("answers/tok")
        end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
        for name, answer, dropped in (("table", "<table> yes", []), ("thought", "\n\nI am fine", [1]),
                                      ("call", "<\uff5ctool\u2581calls\u2581begin\uff5c>get<\uff5ctool\u2581calls\u2581end\uff5c>", [])):
            with self.subTest(name):
                record = self.record(f"answers/{name}.jsonl")
                learnt, prepared = self.learnt(record)
                self.assertEqual(learnt, answer + end)
                self.assertEqual(prepared.targets.dropped, dropped)
                self.assertEqual(prepared.encoded.ids, self.transformers().apply_chat_template(record["messages"])["input_ids"])
        result = self.succeed(self.prepare(CASES / "answers" / "thought.jsonl"))
        self.assertIn("1 messages or thoughts are not, or not whole, in what the chat template writes", result.stderr)
        self.assertIn("thought.jsonl, line 1: messages[1]", result.stderr)

    def test_a_text_is_encoded_once(self):
        self.folder("word-marks/tok")
        reference, end = self.transformers(), 2
        for line, answer in enumerate(("sunny today</s>", "yes</s>", "I am fine</s>")):
            record = self.record("word-marks/pc.jsonl", line)
            learnt, prepared = self.learnt(record)
            self.assertEqual(prepared.encoded.ids, [*reference(record["prompt"] + record["completion"])["input_ids"], end])
            self.assertEqual(learnt, answer)
        record = self.record("word-marks/zephyr.jsonl")
        learnt, prepared = self.learnt(record)
        self.assertEqual(prepared.encoded.ids, reference.apply_chat_template(record["messages"])["input_ids"])
        self.assertEqual(learnt, "I am fine</s> \nIt is sunny</s> \n")

    def test_the_end_token_is_that_of_the_folder(self):
        self.folder("end-token/tok")
        end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
        for text in ("Hello how are you?\n", "I am fine"):
            self.assertEqual(self.learnt({"text": text})[0], text + end)
        result = self.succeed(self.prepare(CASES / "end-token" / "a.txt", CASES / "end-token" / "b.txt"))
        self.assertIn(f"end token {end!r} (id 401): eos_token of {self.model}/tokenizer_config.json", result.stdout)
        self.assertEqual(self.text_and_targets()[0], f"Hello how are you?{end}I am fine{end}")

    def test_templates_are_given_what_transformers_gives_them(self):
        record = self.record("context/sys.jsonl")
        for name, begin in (("tools-none", "<|im_start|>system\nBe nice"), ("date", "<|im_start|>system\n31 January 2025<"),
                            ("tojson", '<|im_start|>system\n"Be nice"'), ("bosnull", "<|im_start|>system\nBe nice")):
            with self.subTest(name):
                self.folder(f"context/{name}")
                learnt, prepared = self.learnt(record, date=DATE)
                self.assertTrue(prepared.text.startswith(begin), prepared.text)
                self.assertEqual(learnt, '"I am fine"<|im_end|>\n' if name == "tojson" else "I am fine<|im_end|>\n")
                if name != "date":  # transformers takes today's date
                    wanted = self.transformers().apply_chat_template(record["messages"])["input_ids"]
                    self.assertEqual(prepared.encoded.ids, wanted)

    def test_fields_of_chats_are_honoured_or_refused(self):
        for name in ("tools", "tools_null"):
            self.folder("fields/tok")
            record = self.record(f"fields/{name}.jsonl")
            learnt, prepared = self.learnt(record)
            self.assertEqual(learnt, '<tool_call>{"city": "Paris"}</tool_call><|im_end|>\nIt is 22 degrees.<|im_end|>\n')
            wanted = self.transformers().apply_chat_template(record["messages"], tools=record["tools"])["input_ids"]
            self.assertEqual(prepared.encoded.ids, wanted)
            self.folder()
            self.refused(self.prepare(CASES / "fields" / f"{name}.jsonl"), f"{name}.jsonl, line 1: field tools", "chat template")
        for folder, learnt in (("fields/tok", "yes<|im_end|>\n"), (None, "yes\n<|endoftext|>")):
            self.folder(folder)
            self.assertEqual(self.learnt(self.record("fields/weight.jsonl"))[0], learnt)

    def test_files_are_read_as_what_they_are(self):
        self.folder()
        files = CASES / "files"
        found = []
        for name in ("CHAT.JSONL", "chat1.ndjson", "chat1.jsonl.gz"):
            self.succeed(self.prepare(files / name))
            found.append(self.written()[:2])
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], found[2])
        self.assertTrue(gzip.decompress((files / "chat1.jsonl.gz").read_bytes()).startswith(b'{"messages"'))
        self.succeed(self.prepare(files / "bom.txt"))
        self.assertEqual(self.text_and_targets()[0], "Hello<|endoftext|>")
        for path in self.root.glob("out.*"):
            path.unlink()
        self.refused(self.prepare(files / "u16.txt"), "u16.txt: byte 0: text in UTF-16", "iconv")
        self.refused(self.prepare(files / "l1.txt"), "l1.txt: byte 3 (0xe9) is not UTF-8", "iconv -f LATIN1")
        self.refused(self.prepare(files / "a.parquet"), "a.parquet", "again")
        header = b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (4,), }\n" + bytes(8)
        self.refused(self.prepare(self.file("tokens.npy", header)), "tokens.npy: byte 0: an array of NumPy", "tandem train --data")


if __name__ == "__main__":
    main()
