"""`tandem sample` by a model's tokenizer: ids and texts are those of the package `tokenizers`; what is said where it fails."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2")

import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from small_model import HOST, SampleTest, main  # noqa: E402
from common import byte_level, first, sentencepiece, unigram  # noqa: E402
from program import PROGRAM, wait_for  # noqa: E402

GREEDY = ["--temperature", "0", "--max-tokens", "40"]
# A tokenizer may be made with fewer ids than the model has: such ids have no text.
TOKENIZERS = {"byte-level": lambda: byte_level("<|end|>", "<|x|>"),
              "byte-level, beginning": lambda: byte_level("<|begin|>", before="<|begin|>"),
              "word marks": lambda: sentencepiece("<|x|>", before="<s>"),
              "ends with </s>": unigram}


def escaped(text):
    """Text as it is printed: no control characters but line breaks and tabs, which a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", text)


class TextInAndOut(SampleTest):
    def environment(self):
        return {**super().environment(), "TANDEM_PYTHON": sys.executable}

    def test_texts_are_those_of_the_tokenizer(self):
        for name, make in TOKENIZERS.items():
            tokenizer = make()
            model = self.text_folder(tokenizer, vocab_size=tokenizer.get_vocab_size())
            texts = ["Hello how are you?", "caf\u00e9 \U0001f600", "a <|x|> b"]
            prompts = [tokenizer.encode(text).ids for text in texts]
            if name.startswith("ends"):
                prompts = [ids[:-1] for ids in prompts]  # an end token behind a prompt would end it
            by_text = self.json_of(model, *(w for text in texts for w in ("--prompt", text)), *GREEDY)["samples"]
            by_ids = self.json_of(model, *(w for ids in prompts for w in ("--prompt-ids", " ".join(map(str, ids)))),
                                  *GREEDY)["samples"]
            for ids, text, sample, of_ids in zip(prompts, texts, by_text, by_ids):
                with self.subTest(name, text=text):
                    self.assertEqual((sample["prompt"], sample["tokens"]), (text, of_ids["tokens"]))
                    whole = tokenizer.decode(ids + sample["tokens"])
                    self.assertEqual(sample["text"], whole[len(tokenizer.decode(ids)):])
            plain = self.succeed(self.sample(model, "--prompt", texts[0], *GREEDY)).stdout
            self.assertEqual(plain, texts[0] + escaped(by_text[0]["text"]) + "\n")
            self.clear()

    def test_tokens_without_a_text_part_no_two_others(self):
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tools"))
        from tokenizer_process import MOST_HELD, Stream
        tokenizer = unigram("<|x|>")
        words, special = tokenizer.encode("how are you").ids[:-1], tokenizer.token_to_id("<|x|>")
        for run in (1, MOST_HELD - 1, MOST_HELD, MOST_HELD + 1, 3 * MOST_HELD):
            ids = [token for word in words for token in [word] + run * [special]]
            stream = Stream(tokenizer, ids[:1])
            text = "".join([stream.next(token) for token in ids[1:]] + [stream.end()])
            self.assertEqual(text, tokenizer.decode(words)[len(tokenizer.decode(words[:1])):], run)

    def clear(self):
        for name in ("text-run", "text-model"):
            subprocess.run(["rm", "-r", str(self.root / name)], check=True)

    def test_the_end_token_of_the_tokenizer_ends_it(self):
        tokenizer = byte_level("<|end|>")
        model = self.text_folder(tokenizer, vocab_size=tokenizer.get_vocab_size())
        free = self.json_of(model, "--prompt", "Hello", *GREEDY)["tokens"]
        # Another token by the name of one that was drawn.
        state = json.loads((model / "tokenizer.json").read_text())
        state["added_tokens"].append({**state["added_tokens"][0], "id": free[6], "content": tokenizer.id_to_token(free[6])})
        (model / "tokenizer.json").write_text(json.dumps(state))
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": tokenizer.id_to_token(free[6])}}))
        ended = self.json_of(model, "--prompt-ids", " ".join(map(str, tokenizer.encode("Hello").ids)), *GREEDY)
        self.assertEqual((ended["finish"], ended["tokens"]), ("end token", free[:free.index(free[6])]))

    def test_what_is_said_where_there_is_no_tokenizer(self):
        tokenizer = byte_level("<|end|>")
        model = self.text_folder(tokenizer, vocab_size=tokenizer.get_vocab_size())

        def run(python, *arguments):
            return subprocess.run([PROGRAM, "sample", "--model", str(model), *HOST, *arguments], capture_output=True, text=True,
                                  env={**self.environment(), "TANDEM_PYTHON": python})

        prompt = ["--prompt", "Hello"]
        self.refused(run("/nowhere/python3", *prompt), 2, "/nowhere/python3", "TANDEM_PYTHON", "--prompt-ids")
        dying = self.file("dying", "#!/bin/sh\necho first >&2\necho out of memory >&2\nexit 3\n")
        bare = self.file("bare", f"#!/bin/sh\nexec {sys.executable} -S -E \"$@\"\n")
        for script in (dying, bare):
            script.chmod(0o755)
        self.refused(run(str(dying), *prompt), 2, "out of memory", "--prompt-ids")
        self.refused(run(str(bare), *prompt), 2, "tokenizers", "pip install tokenizers")
        self.succeed(run("/nowhere/python3", "--prompt-ids", "1 2", "--max-tokens", "2"))
        (model / "tokenizer.json").write_text("{}")
        self.refused(self.sample(model, *prompt), 2, "tokenizer.json")

    def test_a_process_that_hangs_is_given_up(self):
        tokenizer = byte_level("<|end|>")
        model = self.text_folder(tokenizer, vocab_size=tokenizer.get_vocab_size())
        silent = self.file("silent", "#!/bin/sh\nexec sleep 1000\n")
        # Answers the first request, whether there is a template, and reads no other one.
        deaf = self.file("deaf", '#!/bin/sh\nread line\necho \'{"template": false}\'\nexec sleep 1000\n')
        # Closes its output, and goes on.
        mute = self.file("mute", "#!/bin/sh\necho broken >&2\nexec >&-\nexec sleep 1000\n")
        for script in (silent, deaf, mute):
            script.chmod(0o755)

        def run(python, seconds, prompt="Hello"):
            return subprocess.run([PROGRAM, "sample", "--model", str(model), *HOST, "--prompts", self.file("prompt.txt", prompt)],
                                  capture_output=True, text=True, timeout=60,
                                  env={**self.environment(), "TANDEM_PYTHON": str(python), "TANDEM_TOKENIZER_SECONDS": seconds})

        for python, prompt in [(silent, "Hello"), (deaf, "Hello"), (deaf, "Hello" * 100000)]:
            begin = time.monotonic()
            self.refused(run(python, "1", prompt), 5, str(python), "does not answer", "waited 1 s", "TANDEM_TOKENIZER_SECONDS")
            self.assertLess(time.monotonic() - begin, 30)
        self.refused(run(mute, "1"), 2, "broken")
        for seconds in ("0", "-1", "soon", "1e3"):
            self.refused(run(sys.executable, seconds), 2, f"TANDEM_TOKENIZER_SECONDS={seconds}", "seconds")
        self.succeed(run(sys.executable, "60"))

    def test_its_process_goes_with_the_program(self):
        tokenizer = byte_level("<|end|>")
        model = self.text_folder(tokenizer, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=8192)
        program = subprocess.Popen([PROGRAM, "sample", "--model", str(model), *HOST, "--prompt", "Hello", "--max-tokens", "8000",
                                    "--temperature", "2"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                   env=self.environment())
        self.addCleanup(program.stdout.close)
        self.addCleanup(program.kill)
        program.stdout.read(20)
        children = pathlib.Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        self.assertEqual(len(children), 1)
        program.send_signal(signal.SIGKILL)
        program.wait()
        wait_for(lambda: not os.path.exists(f"/proc/{children[0]}") or
                 pathlib.Path(f"/proc/{children[0]}/stat").read_text().split()[2] == "Z", 20)


if __name__ == "__main__":
    main()
