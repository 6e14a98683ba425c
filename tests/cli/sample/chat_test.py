"""`tandem sample --chat`: the chat as the model's template writes it, kept from turn to turn; its commands and Ctrl-C."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2")

import os  # noqa: E402
import pty  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from small_model import HOST, SampleTest, main  # noqa: E402
from common import byte_level  # noqa: E402
from program import PROGRAM  # noqa: E402

TEMPLATE = ("{% if messages[0].role == 'system' %}{{ '<|s|>' + messages[0].content }}{% endif %}"
            "{% for m in messages if m.role != 'system' %}"
            "{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
            "{{ '<|u|>' if m.role == 'user' else '<|a|>' }}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|a|>{% endif %}")
GREEDY = ["--temperature", "0", "--max-tokens", "12"]


class Chat(SampleTest):
    def setUp(self):
        super().setUp()
        self.tokenizer = byte_level("<|s|>", "<|u|>", "<|a|>")
        self.model = self.text_folder(self.tokenizer, TEMPLATE, vocab_size=self.tokenizer.get_vocab_size())

    def environment(self):
        return {**super().environment(), "TANDEM_PYTHON": sys.executable}

    def chat(self, text, *arguments):
        return subprocess.run([PROGRAM, "sample", "--model", str(self.model), *HOST, "--chat", *GREEDY, *arguments], input=text,
                              capture_output=True, text=True, timeout=120, env=self.environment())

    def answer(self, rendered):
        """Text that continues a chat as the template writes it, without --chat."""
        return self.json_of(self.model, "--prompt", rendered, *GREEDY)["text"]

    def shown(self, *answers):
        """Answers as they are printed."""
        return "".join(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda c: f"\\x{ord(c[0]):02x}", a) + "\n" for a in answers)

    def test_answers_continue_what_the_template_writes(self):
        first = self.answer("<|s|>Be brief.<|u|>Hello<|a|>")
        second = self.answer(f"<|s|>Be brief.<|u|>Hello<|a|>{first}<|u|>Why?<|a|>")
        result = self.succeed(self.chat("Hello\n\nWhy?\n", "--system", "Be brief."))
        self.assertEqual(result.stdout, self.shown(first, second))

    def test_reset_forgets_and_exit_ends(self):
        first = self.answer("<|u|>Hello<|a|>")
        result = self.succeed(self.chat("Hello\n/reset\nHello\n/exit\nmore\n"))
        self.assertEqual(result.stdout, self.shown(first, first))

    def test_a_line_that_is_refused_is_forgotten(self):
        first = self.answer("<|u|>Hello<|a|>")
        result = self.chat("bad\nHello\n")
        self.assertEqual((result.returncode, result.stdout), (2, self.shown(first)))  # a pipe's owner has seen no error
        self.assertRegex(result.stderr, "error: .*refuses the chat: no bad words")
        result = self.chat("a very long line of more tokens than there are positions\nHello\n", "--context", "16")
        self.assertEqual(result.returncode, 2)
        self.assertIn("/reset", result.stderr)
        self.assertEqual(self.chat("Hello\nbad\n/exit\n").returncode, 2)

    def test_a_line_that_is_refused_at_a_terminal_is_no_failure(self):
        main_end, other_end = pty.openpty()
        program = subprocess.Popen([PROGRAM, "sample", "--model", str(self.model), *HOST, "--chat", *GREEDY], stdin=other_end,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment())
        self.addCleanup(program.kill)
        os.close(other_end)
        os.write(main_end, b"bad\n/exit\n")
        _, errors = program.communicate(timeout=60)
        os.close(main_end)
        self.assertIn("no bad words", errors)
        self.assertEqual(program.returncode, 0)

    def test_ctrl_c_ends_the_answer_and_not_the_program(self):
        program = subprocess.Popen([PROGRAM, "sample", "--model", str(self.model), *HOST, "--chat", "--temperature", "3",
                                    "--max-tokens", "200", "--link-bandwidth", "5MB/s", "--device-memory", "40MiB"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=self.environment())
        self.addCleanup(program.kill)
        program.stdin.write("Hello\n")
        program.stdin.flush()
        begun = program.stdout.read(1)
        program.send_signal(signal.SIGINT)
        program.stdin.write("/exit\n")
        program.stdin.close()
        program.stdin = None
        rest, errors = program.communicate(timeout=60)
        self.assertEqual(program.returncode, 0, errors)
        made = self.tokenizer.encode((begun + rest).rstrip("\n")).ids
        self.assertLess(len(made), 150, "the answer went on")

    def test_ctrl_c_between_answers_ends_a_piped_conversation(self):
        program = subprocess.Popen([PROGRAM, "sample", "--model", str(self.model), *HOST, "--chat", *GREEDY], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self.environment())
        self.addCleanup(program.kill)
        program.stdin.write("/reset\nHello\n")
        program.stdin.flush()
        self.assertTrue(program.stdout.readline())
        for _ in range(60):  # the first may still find it at the answer
            program.send_signal(signal.SIGINT)
            time.sleep(0.5)
            if program.poll() is not None:
                break
        self.assertEqual(program.poll(), 130)
        program.communicate()

    def test_what_is_no_command_is_not_sent_to_the_model(self):
        result = self.chat("/help\n/exit\n")
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertIn("/help is no command", result.stderr)

    def test_a_tokenizer_without_a_template_is_refused(self):
        (self.model / "chat_template.jinja").unlink()
        self.refused(self.chat("Hello\n"), 2, "--chat", "template")


if __name__ == "__main__":
    main()
