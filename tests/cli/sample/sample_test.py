"""`tandem sample` of bytes and ids: prompts alone and together, stops, end tokens, full positions, and what is refused."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from small_model import HOST, SampleTest, main  # noqa: E402
from program import PROGRAM  # noqa: E402


class Bytes(SampleTest):
    made = None  # a run that all tests read

    def setUp(self):
        super().setUp()
        if Bytes.made is None:
            Bytes.made = tempfile.mkdtemp(prefix="tandem-cli-")
            self.addClassCleanup(shutil.rmtree, Bytes.made)
            self.succeed(self.train("--steps", "20", "--lr", "2e-3", "--out", pathlib.Path(Bytes.made) / "run"))
        self.model = pathlib.Path(Bytes.made) / "run"

    def test_several_prompts_are_as_each_alone(self):
        texts = ["The ", "a line", "x"]
        prompts = [word for text in texts for word in ("--prompt", text)]
        together = self.json_of(self.model, *prompts, "--max-tokens", "9", "--seed", "5", "--batch", "2")["samples"]
        self.assertEqual([s["prompt"] for s in together], texts)
        for text, sample in zip(texts, together):
            self.assertEqual(self.json_of(self.model, "--prompt", text, "--max-tokens", "9", "--seed", "5"), sample)

    def test_prompts_of_files(self):
        texts = ["The ", "caf\u00e9", "\"x\""]
        lines = self.file("prompts.txt", "The \n\ncaf\u00e9\r\n\"x\"\n")
        records = self.file("prompts.jsonl", json.dumps({"prompt": texts[0]}) + "\n" + json.dumps(texts[1]) + "\n"
                            + json.dumps({"id": 3, "prompt": texts[2]}) + "\n")
        made = [self.json_of(self.model, "--prompts", file, "--max-tokens", "4") for file in (lines, records)]
        self.assertEqual([s["prompt"] for s in made[0]["samples"]], texts)
        self.assertEqual(made[0], made[1])
        plain = self.succeed(self.sample(self.model, "--prompts", lines, "--max-tokens", "4")).stdout
        self.assertEqual(plain, "".join(f"--- {i} of 3 ---\n{s['prompt']}{s['text']}\n"
                                        for i, s in enumerate(made[0]["samples"], 1)))
        one = self.succeed(self.sample(self.model, "--prompts", self.file("one.txt", "The \n"), "--max-tokens", "4")).stdout
        self.assertTrue(one.startswith("The "), one)  # a single one needs no line
        for name, content, words in [("bad.jsonl", '{"text": "a"}\n', ["line 1", "no prompt"]), ("no.txt", "\n", ["no prompt"]),
                                     ("latin.txt", b"caf\xe9\n", ["line 1", "UTF-8"]), ("none.txt", None, ["cannot be read"]),
                                     ("", None, ["cannot be read"]), ("empty.txt", "", ["no prompt"]),
                                     ("empty.jsonl", '"a"\n\n{"prompt": ""}\n', ["empty.jsonl, line 3", "an empty prompt"]),
                                     ("long.txt", "a\n" + "x" * 5000 + "\n", ["long.txt, line 2", "5000 tokens", "positions"])]:
            path = self.file(name, content) if content is not None else self.root / name
            self.refused(self.sample(self.model, "--prompts", path), 4, "--prompts", *words)

    def test_prompts_of_standard_input(self):
        def piped(text, *arguments):
            return subprocess.run([PROGRAM, "sample", "--model", str(self.model), *HOST, "--prompts", "-", "--max-tokens", "4",
                                   *arguments], input=text, capture_output=True, timeout=120, env=self.environment())

        wanted = self.json_of(self.model, "--prompt", "The ", "--prompt", "caf\u00e9", "--max-tokens", "4")
        for text in ("The \n\ncaf\u00e9", '{"prompt": "The "}\n"caf\u00e9"\n'):
            result = piped(text.encode(), "--json")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(json.loads(result.stdout), wanted)
        self.assertEqual(json.loads(piped(b"{x}\n", "--json").stdout)["prompt"], "{x}")  # no record: text
        for text, word in [(b"", b"no prompt"), (b"a\ncaf\xe9\n", b"--prompts -, line 2"), (b'{"prompt": "a"}\n{}\n', b"-, line 2")]:
            result = piped(text)
            self.assertEqual(result.returncode, 4, result.stderr)
            self.assertIn(word, result.stderr)

    def test_a_stop_ends_the_text_before_it(self):
        free = self.json_of(self.model, "--prompt", "The ", "--temperature", "0", "--max-tokens", "30")
        self.assertEqual((free["finish"], len(free["tokens"])), ("length", 30))
        stop = free["text"][10:12]
        cut = self.json_of(self.model, "--prompt", "The ", "--temperature", "0", "--max-tokens", "30", "--stop", "\u0101",
                           "--stop", stop)
        self.assertEqual(cut["finish"], "stop")
        self.assertEqual(cut["text"], free["text"][:free["text"].index(stop)])
        plain = self.succeed(self.sample(self.model, "--prompt", "The ", "--temperature", "0", "--max-tokens", "30", "--stop",
                                         stop)).stdout
        self.assertEqual(plain, "The " + cut["text"] + "\n")

    def test_full_positions_end_it_and_are_told_of(self):
        result = self.succeed(self.sample(self.model, "--prompt", "The ", "--max-tokens", "100000", "--json"))
        sample = json.loads(result.stdout)
        self.assertRegex(result.stderr, r"the \d+ positions of tiny-gpt2 are full")
        positions = int(re.search(r"the (\d+) positions", result.stderr)[1])
        self.assertEqual((sample["finish"], len(sample["tokens"])), ("positions", positions + 1 - 4))
        self.refused(self.sample(self.model, "--prompt", "x" * (positions + 1)), 2, f"{positions + 1} tokens", "positions")

    def test_penalties_and_shares_change_what_is_drawn(self):
        plain = self.json_of(self.model, "--prompt", "The ", "--max-tokens", "30", "--temperature", "0")["tokens"]
        other = self.json_of(self.model, "--prompt", "The ", "--max-tokens", "30", "--temperature", "0",
                             "--repetition-penalty", "5")["tokens"]
        self.assertGreater(len(set(other)), len(set(plain)))
        one = self.json_of(self.model, "--prompt", "The ", "--max-tokens", "30", "--temperature", "2", "--top-p", "1e-9")
        self.assertEqual(one["tokens"], plain)

    def test_refusals(self):
        for flag, value in [("--top-p", "0"), ("--top-p", "1.5"), ("--top-p", "nan"), ("--repetition-penalty", "0"),
                            ("--batch", "0")]:
            self.refused(self.sample(self.model, "--prompt", "x", flag, value), 2, flag, value, "out of range")
        self.refused(self.sample(self.model, "--prompt", "x", "--stop", ""), 2, "--stop")
        self.refused(self.sample(self.model, "--prompt", "x", "--prompt-ids", "1"), 2, "--prompt-ids")
        self.refused(self.sample(self.model, "--chat", "--prompt", "x"), 2, "--chat")
        self.refused(self.sample(self.model, "--chat", "--json"), 2, "--chat", "--json")
        self.refused(self.sample(self.model, "--prompt", "x", "--system", "y"), 2, "--system", "--chat")
        self.refused(self.sample(self.model, "--prompt", "x", "--context", "9"), 2, "--context", "--chat")
        self.refused(self.sample(self.model, "--chat"), 2, "--chat", "tokenizer")


class Ids(SampleTest):
    def test_ids_stops_and_end_tokens(self):
        model = self.folder()
        greedy = ["--prompt", "5 6 7", "--temperature", "0", "--max-tokens", "12"]
        free = self.json_of(model, *greedy)
        self.assertNotIn("text", free)
        self.assertEqual(self.succeed(self.sample(model, *greedy)).stdout,
                         "5 6 7 " + " ".join(map(str, free["tokens"])) + "\n")
        self.assertEqual(self.json_of(model, *["--prompt-ids" if w == "--prompt" else w for w in greedy]), free)

        tokens = free["tokens"]
        stop = tokens[4:6]
        end = next(i for i in range(2, 13) if tokens[i - 2:i] == stop)
        cut = self.json_of(model, *greedy, "--stop", " ".join(map(str, stop)))
        self.assertEqual((cut["finish"], cut["tokens"]), ("stop", tokens[:end]))

        before = tokens[:tokens.index(tokens[7])]
        for name, content in [("generation_config.json", {"eos_token_id": [511, tokens[7]]}),
                              ("generation_config.json", {"eos_token_id": tokens[7]})]:
            (model / name).write_text(json.dumps(content))
            ended = self.json_of(model, *greedy)
            self.assertEqual((ended["finish"], ended["tokens"]), ("end token", before))
        (model / "generation_config.json").unlink()
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "eos_token_id": tokens[7]}))
        self.assertEqual(self.json_of(model, *greedy)["tokens"], before)

    def test_end_tokens_that_are_no_ids_are_told_of(self):
        model = self.folder()
        config = json.loads((model / "config.json").read_text())
        ids = ["--prompt", "5 6 7", "--max-tokens", "2"]

        def told(name, content):
            (model / name).write_text(json.dumps(content))
            result = self.succeed(self.sample(model, *ids))
            return [line for line in result.stderr.splitlines() if "eos_token_id" in line]

        for value, shown in [(-1, "-1"), (512, "512"), ("</s>", '"</s>"'), (1.5, "1.5"), (True, "true"), ([3, 2 ** 64 - 1], str(2 ** 64 - 1))]:
            with self.subTest(value=value):
                (line,) = told("generation_config.json", {"eos_token_id": value})
                self.assertIn(f"eos_token_id of {model}/generation_config.json has {shown}, which is no token id", line)
        for value in (None, 3, [3, 511], []):
            self.assertEqual(told("generation_config.json", {"eos_token_id": value}), [])
        (model / "generation_config.json").unlink()
        (line,) = told("config.json", {**config, "eos_token_id": [3, -2]})
        self.assertIn("eos_token_id of the model's config.json has -2", line)


if __name__ == "__main__":
    main()
