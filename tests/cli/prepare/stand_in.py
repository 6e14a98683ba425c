"""A preparation whose tokenizer makes a token of each byte, so that any Python can run the tests that use it."""
import contextlib
import os
import pathlib
import signal
import subprocess
import sys

from program import ProgramTest, wait_for

TOOL = pathlib.Path(__file__).resolve().parents[3] / "tools" / "prepare_data.py"
# A package `tokenizers` with what the tool uses of it. A text with the word "slow" takes its time; $DIE_BEFORE=N kills the
# process before the Nth time that it changes an output.
STAND_IN = '''
import os, signal, time

class Encoding:
    def __init__(self, content):
        self.ids = list(content)
        self.offsets = [(i, i + 1) for i in range(len(content))]
        self.special_tokens_mask = [0] * len(content)
        if b"broken" in content:
            del self.ids

class Tokenizer:
    post_processor = None

    @classmethod
    def from_file(cls, name):
        return cls()

    def no_truncation(self):
        pass

    def no_padding(self):
        pass

    def token_to_id(self, token):
        return 256 if token == "<|endoftext|>" else None

    def id_to_token(self, number):
        return "<|endoftext|>" if number == 256 else None

    def get_vocab_size(self, with_added_tokens=True):
        return 257

    def get_added_tokens_decoder(self):
        return {}

    def encode(self, text, add_special_tokens=True):
        time.sleep(0.05 * text.count("slow"))
        return Encoding(text.encode())

def mortal(function):
    def call(*arguments, **options):
        if str(arguments[-1]).endswith(("out.bin", "out.json", "out.mask.bin", "out-validation.bin", "out-validation.json")):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

left = [int(os.environ.get("DIE_BEFORE", 0))]
if left[0]:
    os.replace, os.unlink = mortal(os.replace), mortal(os.unlink)
'''
SLOW = ['{"text": "slow"}\n'] * 200  # ten seconds of one worker
QUICK = '{"prompt": "a", "completion": "bc"}\n'


class StandInTest(ProgramTest):
    """`d` is the folder of the outputs of a test."""

    def setUp(self):
        super().setUp()
        self.file("stand-in/tokenizers.py", STAND_IN)
        self.file("model/tokenizer.json", "{}")
        self.d = self.root / "d"
        self.d.mkdir()
        self.out = self.d / "out.bin"

    def command(self, *arguments):
        return [sys.executable, str(TOOL), "--tokenizer", str(self.root / "model"), "--workers", "2", *map(str, arguments)]

    def settings(self, **more):
        return {**os.environ, "PYTHONPATH": str(self.root / "stand-in"), "PYTHONDONTWRITEBYTECODE": "1", **more}

    def prepare(self, *arguments, preexec_fn=None, **environment):
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=120, preexec_fn=preexec_fn,
                              env=self.settings(**environment), cwd=self.root)

    def begin(self, *arguments):
        """A slow run that has finished a part and works on others, in a process group of its own."""
        process = subprocess.Popen(self.command("--part-bytes", "200", *arguments), env=self.settings(), cwd=self.root,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
                                   # Shells start background jobs with SIGINT ignored, and the tool leaves it so.
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        self.addCleanup(process.communicate)

        def end():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        self.addCleanup(end)
        wait_for(lambda: process.poll() is not None or list(self.d.rglob("*.parts/*/*.json")))
        self.assertIsNone(process.poll(), "it ended too early")
        return process
