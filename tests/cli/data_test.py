"""Token files with masks and rows, as train and eval take them; and what tools/prepare_data.py makes."""
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import time

from program import SMALL, ProgramTest, main

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"
TOKENIZERS = os.environ.get("TANDEM_TEST_PYTHON", sys.executable)


class Masks(ProgramTest):
    def tokens(self, name, values, mask=None, **description):
        path = self.file(f"{name}.bin", struct.pack(f"<{len(values)}H", *values))
        if mask is not None:
            self.file(f"{name}.mask.bin", bytes(mask))
        if description:
            self.file(f"{name}.json", json.dumps(description))
        return path

    def evaluate(self, model, data, *flags):
        result = self.run_program("eval", "--model", model, "--data", data, "--threads", "1", "--json", *flags)
        return json.loads(self.succeed(result).stdout)

    def model(self):
        """Trained on ids, so that it takes ids."""
        out = self.root / "model"
        data = self.tokens("ids", [i * i % 251 for i in range(3000)])
        self.succeed(self.train("--steps", "2", "--out", out, data=data))
        return out

    def test_only_targets_count(self):
        model = self.model()
        values = [i * i % 251 for i in range(65)]
        whole = self.evaluate(model, self.tokens("whole", values), "--seq-len", "64")
        self.assertEqual((whole["tokens"], whole["windows"]), (64, 1))
        parts = []
        for name, chosen in [("even", lambda i: i % 2 == 0), ("odd", lambda i: i % 2 == 1)]:
            mask = [int(chosen(i)) for i in range(65)]
            parts.append(self.evaluate(model, self.tokens(name, values, mask), "--seq-len", "64"))
        self.assertEqual([p["tokens"] for p in parts], [32, 32])
        # The two halves of the targets add up to all of them.
        self.assertAlmostEqual(sum(p["loss"] * p["tokens"] for p in parts), whole["loss"] * 64, delta=64 * 1e-6)

    def test_padding_of_rows_changes_nothing(self):
        model = self.model()
        row = [i * 7 % 251 for i in range(20)]
        short = self.tokens("short", row, [1] * 20, layout="rows", row_length=20, dtype="uint16")
        padded = self.tokens("padded", row + [0] * 12, [1] * 20 + [0] * 12, layout="rows", row_length=32, dtype="uint16")
        one, two = self.evaluate(model, short, "--seq-len", "31"), self.evaluate(model, padded)
        self.assertEqual(one, two)
        self.assertEqual(one["tokens"], 19)

    def test_training_counts_targets_and_skips_what_has_none(self):
        values = [i * i % 251 for i in range(4 * 33)]
        mask = [0] * 33 + [int(i % 3 == 0) for i in range(33)] + [1] * 33 + [0] * 33
        data = self.tokens("rows", values, mask, layout="rows", row_length=33, dtype="uint16", vocab_size=256)
        out = self.root / "run"
        arguments = ["train", "--model", "tiny-gpt2", "--data", data, "--out", out, "--epochs", "1", "--device", "host",
                     "--threads", "1", "--eval-data", data]
        result = self.succeed(self.run_program(*arguments))
        summary, metrics = self.summary(out), self.metrics(out)
        self.assertEqual(summary["steps"], 4)  # a row each
        self.assertEqual(summary["skipped_steps"], 2)
        self.assertEqual(summary["tokens"], 10 + 32)
        self.assertEqual(result.stderr.count("hold no target"), 2)
        self.assertEqual([m["loss"] is None for m in metrics], [m["skipped"] for m in metrics])
        self.assertIn('seq-len = 32', (out / "config.toml").read_text())

    def test_accumulation_is_the_same_loss(self):
        values = [i * i % 251 for i in range(8 * 33)]
        mask = [int(i * i % 7 < 3) for i in range(8 * 33)]
        data = self.tokens("rows", values, mask, layout="rows", row_length=33, dtype="uint16")
        losses = []
        for name, micro, accumulated in [("a", 4, 1), ("b", 1, 4)]:
            out = self.root / name
            self.succeed(self.run_program("train", "--model", "tiny-gpt2", "--data", data, "--out", out, "--steps", "4",
                                          "--micro-batch", micro, "--grad-accum", accumulated, "--device", "host",
                                          "--threads", "1", "--lr", "1e-3"))
            losses.append([m["loss"] for m in self.metrics(out)])
        for one, four in zip(*losses):
            self.assertAlmostEqual(one, four, delta=2e-3 * one)
        self.assertAlmostEqual(losses[0][0], losses[1][0], delta=1e-6 * losses[0][0])


class Preparing(ProgramTest):
    def setUp(self):
        super().setUp()
        if subprocess.run([TOKENIZERS, "-c", "import tokenizers"], capture_output=True).returncode != 0:
            print(f"skipped: {TOKENIZERS} has no tokenizers (TANDEM_TEST_PYTHON names another Python)")
            self.skipTest("no tokenizers")
        make = ("from tokenizers import Tokenizer, models, pre_tokenizers\n"
                "alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())\n"
                "vocabulary = {'<|endoftext|>': 0, **{c: i + 1 for i, c in enumerate(alphabet)}}\n"
                "t = Tokenizer(models.BPE(vocabulary, []))\n"
                "t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)\n"
                "t.add_special_tokens(['<|endoftext|>'])\n"
                f"t.save({str(self.root / 'tokenizer.json')!r})\n")
        subprocess.run([TOKENIZERS, "-c", make], check=True)

    def prepare(self, *arguments):
        return subprocess.run([TOKENIZERS, TOOL, "--tokenizer", self.root, "--workers", "2", *map(str, arguments)],
                              capture_output=True, text=True, timeout=300)

    def content(self, out):
        description = json.loads(out.with_suffix(".json").read_text())
        raw = out.read_bytes()
        mask = out.with_suffix(".mask.bin")
        return description, list(struct.unpack(f"<{len(raw) // 2}H", raw)), mask.read_bytes() if mask.exists() else None

    def test_text_chat_and_completions(self):
        out = self.root / "out.bin"
        self.file("docs/a.txt", "ab")
        self.file("docs/b.txt", "c")
        self.succeed(self.prepare("--out", out, self.root / "docs"))
        description, tokens, mask = self.content(out)
        self.assertEqual((len(tokens), mask, tokens[2], tokens[4]), (5, None, 0, 0))
        self.assertEqual(description["vocab_size"], 257)
        self.assertEqual((description["layout"], description["tokens"], description["end_token"]), ("stream", 5, 0))

        records = [{"prompt": "12", "completion": "345"},
                   {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
                   {"text": "plain"}]
        chat = self.file("chat.jsonl", "".join(json.dumps(r) + "\n" for r in records))
        self.succeed(self.prepare("--out", out, "--layout", "rows", chat))
        description, tokens, mask = self.content(out)
        length = description["row_length"]
        rows = [mask[i:i + length] for i in range(0, len(mask), length)]
        self.assertEqual(len(rows), 3)
        self.assertEqual(rows[0], bytes([0, 0, 1, 1, 1, 1]) + bytes(length - 6))  # the completion and its end
        prefix = len("<|user|>\nhi\n<|assistant|>\n")
        self.assertEqual(rows[1], bytes(prefix) + bytes([1] * len("yo\n") + [1]))
        self.assertEqual(rows[2][:6], bytes([1] * 6))
        result = self.train("--steps", "1", "--out", self.root / "run", data=out)
        self.assertIn("vocabulary of 257", self.succeed(result).stderr)  # one more than the model's, and not in the data

    def need_jinja(self):
        if subprocess.run([TOKENIZERS, "-c", "import jinja2"], capture_output=True).returncode != 0:
            self.skipTest("jinja2 is missing")

    def text_and_targets(self, out):
        """Of a file whose tokens are bytes: what was written, and what of it is to be learnt; without padding."""
        _, tokens, mask = self.content(out)
        vocabulary = json.loads((self.root / "tokenizer.json").read_text())["model"]["vocab"]
        letter = {i: c for c, i in vocabulary.items()}
        text = [letter[t].replace("\u010a", "\n").replace("\u0120", " ") for t in tokens]
        return "".join(text), "".join(c for c, m in zip(text, mask) if m)

    def chat(self, *contents):
        roles = ["user", "assistant"] * len(contents)
        return self.file("chat.jsonl", json.dumps({"messages": [{"role": r, "content": c} for r, c in zip(roles, contents)]}))

    def test_answers_that_a_template_rewrites_are_context(self):
        self.need_jinja()
        # Thoughts are written in the last answer alone, empty ones too.
        (self.root / "chat_template.jinja").write_text(
            "{% for m in messages %}<{{ m.role }}>\n"
            "{% if m.role == 'assistant' %}{% set parts = m.content.split('|') %}"
            "{% if loop.last %}[{{ parts[0] if parts | length > 1 else '' }}]{% endif %}{{ parts[-1] }}"
            "{% else %}{{ m.content }}{% endif %}$\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>\n{% endif %}")
        out = self.root / "out.bin"
        for contents, text, targets in [
                (("a", "b", "c", "d"), "<user>\na$\n<assistant>\nb$\n<user>\nc$\n<assistant>\n[]d$\n", "[]d$\n"),
                (("a", "x|b", "c", "y|d"), "<user>\na$\n<assistant>\nb$\n<user>\nc$\n<assistant>\n[y]d$\n", "[y]d$\n")]:
            result = self.prepare("--out", out, self.chat(*contents))
            self.assertIn("1 answers are no targets", self.succeed(result).stderr)
            self.assertEqual(self.text_and_targets(out), (text, targets))
        # A header that opens thoughts, of which an answer without them has none.
        (self.root / "chat_template.jinja").write_text(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant><think>{% endif %}")
        self.succeed(self.prepare("--out", out, self.chat("a", "b", "c", "d")))
        self.assertEqual(self.text_and_targets(out), ("<user>a<assistant>b<user>c<assistant>d", "bd"))
        (self.root / "chat_template.jinja").write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
        result = self.prepare("--out", out, self.chat("a", "b"))
        self.assertEqual(result.returncode, 2)
        self.assertIn("the chat template does not write message 1", result.stderr)

    def test_templates_stand_where_models_have_them(self):
        self.need_jinja()
        out = self.root / "out.bin"
        # By name, with what transformers lends to templates: loops that end early, marks of answers, JSON.
        source = ("{{ bos_token }}{% for m in messages %}{% if loop.index0 > 8 %}{% break %}{% endif %}"
                  "{{ m | tojson }}{% if m.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}{% endfor %}")
        for name, content in [
                ("tokenizer_config.json", {"bos_token": {"content": "^"}, "chat_template": source}),
                ("tokenizer_config.json", {"bos_token": "^", "chat_template": [
                    {"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]}),
                ("chat_template.json", {"chat_template": source})]:
            with self.subTest(name=name):
                self.file(name, json.dumps(content))
                if name == "chat_template.json":
                    self.file("special_tokens_map.json", json.dumps({"bos_token": "^"}))
                self.succeed(self.prepare("--out", out, self.chat("<a>", "b")))
                text, targets = self.text_and_targets(out)
                self.assertEqual(text, '^{"role": "user", "content": "<a>"}{"role": "assistant", "content": "b"}!')
                self.assertEqual(targets, '{"role": "assistant", "content": "b"}!')
                (self.root / name).unlink()
        for name, content, word in [("tokenizer_config.json", "{", "not JSON"), ("tokenizer_config.json", "[]", "no object"),
                                    ("tokenizer_config.json", '{"chat_template": [{"name": "rag"}]}', "default"),
                                    ("tokenizer_config.json", '{"chat_template": 1}', "no text"),
                                    ("chat_template.jinja", b"\xff", "utf-8"), ("chat_template.json", "", "not JSON")]:
            path = self.file(name, content)
            result = self.prepare("--out", out, self.chat("a", "b"))
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(word, result.stderr.splitlines()[-1])
            self.assertNotIn("Traceback", result.stderr)
            path.unlink()

    def test_a_template_writes_the_chat(self):
        (self.root / "chat_template.jinja").write_text(
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}!{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")
        chat = self.file("chat.jsonl", json.dumps({"messages": [
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}) + "\n")
        out = self.root / "out.bin"
        if subprocess.run([TOKENIZERS, "-c", "import jinja2"], capture_output=True).returncode != 0:
            self.assertIn("jinja2 is missing", self.prepare("--out", out, chat).stderr)
            return
        self.succeed(self.prepare("--out", out, "--layout", "rows", chat))
        _, tokens, mask = self.content(out)
        self.assertEqual(len(tokens), len("[user]hi![assistant]yo!"))
        self.assertEqual(mask, bytes(len("[user]hi![assistant]")) + bytes([1] * len("yo!")))

    def test_parts_change_nothing(self):
        lines = "".join(json.dumps({"prompt": f"{i}+{i}=", "completion": f"{2 * i}"}) + "\n" for i in range(300))
        records = self.file("r.jsonl", lines)
        whole, parts = self.root / "whole.bin", self.root / "parts.bin"
        self.succeed(self.prepare("--out", whole, records))
        self.succeed(self.prepare("--out", parts, "--part-bytes", "500", records))
        self.assertEqual(self.content(whole), self.content(parts))
        self.assertFalse(parts.with_suffix(".parts").exists())

    def test_a_killed_run_goes_on_with_the_parts_that_are_missing(self):
        lines = "".join(json.dumps({"text": f"{i} and {i * i} and so on, " * 20}) + "\n" for i in range(1000))
        records = self.file("r.jsonl", lines)
        whole, killed = self.root / "whole.bin", self.root / "killed.bin"
        self.succeed(self.prepare("--out", whole, records))
        arguments = ["--tokenizer", self.root, "--workers", "2", "--out", killed, "--part-bytes", "20000", records]
        process = subprocess.Popen([TOKENIZERS, TOOL, *map(str, arguments)], start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(self.root.glob("killed.parts/*/*.json"))) < 3:
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        self.assertEqual(process.wait(), -signal.SIGKILL, "it ended before it could be killed")
        self.assertFalse(killed.exists())
        result = self.succeed(self.prepare(*arguments[4:]))
        going_on = re.search(r"going on with (\d+) of (\d+) parts", result.stderr + result.stdout)
        self.assertLess(int(going_on.group(1)), int(going_on.group(2)))
        self.assertEqual(self.content(whole), self.content(killed))
        self.assertFalse(killed.with_suffix(".parts").exists())

    def test_refusals_are_one_line(self):
        out = self.root / "out.bin"
        for arguments, word in [((self.root / "none",), "no such file"),
                                ((self.file("a.jsonl", "{}\n"),), "a record needs"),
                                ((self.file("b.jsonl", "[\n"),), "not a line of JSON"),
                                ((self.file("c.txt", ""), "--no-end-token"), "no tokens"),
                                ((self.file("d.jsonl", '{"text": "a\\ud800b"}\n'),), "byte 0: \\ud800 is half"),
                                ((self.text, "--end-token", "<none>"), "no such token"),
                                ((self.text, "--row-length", "4"), "--layout rows")]:
            result = self.prepare("--out", out, *arguments)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(word, result.stderr.splitlines()[-1])
            self.assertNotIn("Traceback", result.stderr)
            self.assertFalse(out.exists())

    def test_a_template_that_fails_is_one_line(self):
        self.need_jinja()
        chat = self.file("chat.jsonl", json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
        for template, word in [("{% for %}", "TemplateSyntaxError"), ("{{ nothing.at.all }}", "UndefinedError"),
                               ("{{ ''.__class__.__mro__ }}", "SecurityError"),
                               ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
                               ("{{ 1 // 0 }}", "ZeroDivisionError"), ("{{ raise_exception('no') }}", "refuses a record: no")]:
            (self.root / "chat_template.jinja").write_text(template)
            result = self.prepare("--out", self.root / "out.bin", chat)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("the chat template", result.stderr.splitlines()[-1])
            self.assertIn(word, result.stderr.splitlines()[-1])
            self.assertNotIn("Traceback", result.stderr)


if __name__ == "__main__":
    main()
