#!/usr/bin/env python3
"""Every command of README and docs, taken out of the pages, against the built program; and docs/cli.md against its help.

Usage: commands_test.py PROGRAM [TEST...]

A command of tandem runs as it stands, in a folder with the files that pages speak of, but for what would take long: what
would compute is sent to a GPU that no machine has, and must get as far as asking for it (exit 5), by when flags, model and
data have been read; a plan for another machine is made for a fixed policy, which needs no search.
"""
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pages

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else ROOT / "build" / "tandem"
SUBCOMMANDS = ("train", "plan", "calibrate", "bench", "eval", "score", "sample", "export", "digest", "report", "launch")
NOWHERE = ["--device", "cuda:99"]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
TEXT = "".join(f"The {n}th line of a small text says that {n * n} is the square of {n}.\n" for n in range(60))
# Flags that pages name and that are of other programs: cmake, ctest, pip, nsys, the compiler.
FINETUNE = set(re.findall(r'"(--[a-z0-9-]+)"', (ROOT / "python" / "tandem" / "finetuning" / "command.py").read_text()))
OTHERS = {"--build", "--preset", "--target", "--install", "--prefix", "--test-dir", "--trace", "--parallel"}


def run(*arguments, cwd=None):
    with tempfile.TemporaryDirectory(prefix="tandem-docs-cache-") as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


def flags_of_help(text):
    """Flags that a help text lists, those that take a switch back among them."""
    listed = [line for line in text.splitlines() if re.match(r"\s+-", line)]
    names = {f for line in listed for f in FLAG.findall(re.split(r"\s{2,}|\s[A-Z[]", line.strip())[0])}
    return names | set(re.findall(r"--no-[a-z-]+(?= takes it back)", text))


def commands_of(lines):
    """Commands in the lines of a fenced block: continued lines joined, comments and loops taken away."""
    text = "\n".join(lines).replace("\\\n", " ")
    for name, values in re.findall(r"for (\w+) in ([^;\n]+); do", text):
        text = text.replace("${" + name + "}", values.split()[0])
    for line in text.splitlines():
        lexer = shlex.shlex(line.replace("$(", "("), posix=True, punctuation_chars="|&;>")
        lexer.whitespace_split = True
        words = []
        try:
            for word in [*lexer, ";"]:
                if set(word) <= set("|&;"):
                    if words:
                        yield words
                    words = []
                else:
                    words.append(word)
        except ValueError:  # the output of a program: no shell would read it
            continue


def program_command(words):
    """Arguments of tandem in the words of a command, perhaps behind a profiler or variables; None where it is not in them."""
    names = [i for i, word in enumerate(words) if word in ("tandem", "build/tandem")]
    if not names or not all("=" in w or w in ("nsys", "profile", "cuda,nvtx") or w.startswith("-") for w in words[:names[0]]):
        return None
    arguments = words[names[0] + 1:]
    if ">" in arguments:
        arguments = arguments[:arguments.index(">")]
    return arguments if arguments and (arguments[0] in SUBCOMMANDS or arguments[0].startswith("-")) else None


def blocks():
    for page in pages.user_pages(ROOT):
        for number, language, lines in pages.split((ROOT / page).read_text())[1]:
            if language in ("", "sh", "bash"):
                yield page, number, lines


def tandem_commands():
    for page, number, lines in blocks():
        for words in commands_of(lines):
            arguments = program_command(words)
            if arguments:
                yield f"{page}:{number}", arguments


class Folder:
    """Files that pages speak of, made small: text, a run with a checkpoint, a model, token files."""

    def __init__(self, root):
        self.root = root
        for name in ("corpus/a.txt", "my-text/a.txt", "held-out/a.txt", "held-out.txt", "docs/a.txt",
                     "build/quickstart/text/train/a.txt", "build/quickstart/text/held-out/a.txt"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(TEXT)
        (root / "profiles").symlink_to(ROOT / "profiles")
        (root / "anywhere").mkdir()
        (root / "prompt.txt").write_text("1 2 3")
        self.make("train", "--model", "tiny-llama", "--data", "corpus", "--seq-len", "64", "--steps", "2", "--out", "run",
                  "--device", "host", "--threads", "1", "--update-threads", "1")
        self.make("export", "run", "--to", "model")
        for name in ("config.json",):  # a model of longer sequences, and of token ids
            text = (root / "model" / name).read_text()
            text = re.sub(r'"max_position_embeddings": \d+', '"max_position_embeddings": 4096', text)
            (root / "model" / name).write_text(re.sub(r',\s*"tandem_token_kind": "bytes"', "", text))
        for name in ("train", "train-validation"):  # pairs of answers
            (root / "data").mkdir(exist_ok=True)
            (root / "data" / f"{name}.bin").write_bytes(bytes(i // 2 % 200 if i % 2 == 0 else 0 for i in range(256)))
            (root / "data" / f"{name}.mask.bin").write_bytes(bytes(i % 16 > 7 for i in range(128)))
            (root / "data" / f"{name}.json").write_text('{"dtype": "uint16", "layout": "rows", "row_length": 16, "pairs": true}')
        for name in ("chat.bin", "ids.bin"):
            (root / name).write_bytes(bytes(i % 200 if i % 2 == 0 else 0 for i in range(20000)))
        shutil.copytree(root / "run", root / "kept")
        self.make("train", "--model", "model", "--data", "ids.bin", "--seq-len", "64", "--steps", "1", "--lora-rank", "2",
                  "--out", "kept-lora", "--device", "host", "--threads", "1", "--update-threads", "1")

    def make(self, *arguments):
        done = run(*arguments, cwd=self.root)
        if done.returncode:
            raise AssertionError(done.stderr)

    def prepare(self, arguments):
        """Puts the runs that this command reads where it looks for them, and clears what it is to make."""
        for name in ("one", "two", "run", "runs", "out", "tuned", "exported", "bench-1", "bench-2", "x", "adapter", "merged"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        reads = [arguments[i + 1] for i, a in enumerate(arguments[:-1]) if a in ("--model", "--resume") or a == "--out" and "--resume" in arguments]
        for name in [*reads, *arguments[1:2]]:
            if name.split("/")[0] in ("run", "runs"):
                kept = "kept-lora" if name == "runs/lora" else "kept"
                shutil.copytree(self.root / kept, self.root / name, dirs_exist_ok=True)
                config = self.root / name / "config.toml"
                config.write_text(config.read_text().replace('out = "run"', f'out = "{name}"'))
        if "--config" in arguments:
            name = Path(arguments[arguments.index("--config") + 1])
            (self.root / name.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(self.root / "kept" / "config.toml", self.root / name)


def made_cheap(arguments):
    """The command with what makes it end soon, and the exit codes that are right for it."""
    name = arguments[0]
    if "--help" in arguments:
        return arguments, {0}
    if name == "plan" and "--profile" in arguments or name == "plan" and "--fit" in arguments:
        return [*arguments, *([] if "--policy" in arguments else ["--policy", "host", "--recompute", "block"])], {0, 3}
    if name == "bench" and "--profile" in arguments:
        return [*("interleave:4" if a == "auto" else a for a in arguments), "--model", "tiny-gpt2"], {0}
    if name == "calibrate" and "--show" in arguments:
        return arguments, {0, 2, 4}  # 2, 4: this machine was never calibrated
    if name in ("launch", "train", "plan", "calibrate", "bench", "eval", "score", "sample"):
        return [*arguments, *NOWHERE], {5}
    return arguments, {0}


class Commands(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="tandem-docs-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Folder(Path(folder.name))

    def outcome(self, arguments):
        """None where the command is right; else what is wrong."""
        self.folder.prepare(arguments)
        cheap, right = made_cheap(arguments)
        done = run(*cheap, cwd=self.folder.root)
        return None if done.returncode in right else f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"

    def test_every_command_of_the_pages_is_taken_by_the_program(self):
        commands = list(tandem_commands())
        self.assertGreater(len(commands), 40)
        self.assertGreater(len({where.split(":")[0] for where, _ in commands}), 7)
        for where, arguments in commands:
            with self.subTest(where=where, command=shlex.join(arguments)):
                self.assertIsNone(self.outcome(arguments))

    def test_a_wrong_command_is_noticed(self):
        for wrong in ("train --model tiny-gpt2 --data corpus --steps 2 --no-such-flag 1", "train --model tiny-gpt3 --data corpus --steps 2",
                      "plan --model gpt2 --profile profiles/none.toml", "train --model tiny-gpt2 --data corpus --steps few",
                      "plan --model gpt2 --fit layers", "export run --to exported --dtype fp64", "digest nowhere",
                      "bench --model tiny-gpt2 --policies hosts", "sample --model run", "train --resume --out run --lr much"):
            with self.subTest(wrong):
                self.assertIsNotNone(self.outcome(wrong.split()))

    def test_commands_are_found_in_blocks(self):
        lines = ["for host in 28.5 60; do", "  tandem plan --fit model --host-memory ${host}GiB", "done",
                 "nsys profile --trace cuda,nvtx tandem train --steps 5 \\", "    --seq-len 8   # a remark", "tandem 0.1.0 | a run",
                 "A=1 build/tandem eval --json > answer.json && tandem digest run"]
        found = [c for c in map(program_command, commands_of(lines)) if c]
        self.assertEqual(found, [["plan", "--fit", "model", "--host-memory", "28.5GiB"], ["train", "--steps", "5", "--seq-len", "8"],
                                 ["eval", "--json"], ["digest", "run"]])

    def test_scripts_and_tools_of_the_pages_are_there_and_know_their_flags(self):
        found = 0
        for page, number, lines in blocks():
            for words in commands_of(lines):
                words = words[1:] if words[0] == "python3" else words
                if not re.match(r"(tools|scripts)/[\w.]+$", words[0] if words else ""):
                    continue
                found += 1
                with self.subTest(where=f"{page}:{number}", command=words):
                    file = ROOT / words[0]
                    self.assertTrue(os.access(file, os.X_OK), "is no program")
                    known = set(FLAG.findall(file.read_text()))
                    self.assertEqual({w.split("=")[0] for w in words if w.startswith("--")} - known, set())
        self.assertGreater(found, 4)


class Help(unittest.TestCase):
    def setUp(self):
        self.listed = {name: flags_of_help(run(name, "--help").stdout) for name in SUBCOMMANDS}
        self.listed["tandem"] = flags_of_help(run("--help").stdout)
        self.all = set().union(*self.listed.values())
        self.page = (ROOT / "docs" / "cli.md").read_text()

    def test_flags_are_found_in_a_help_text(self):
        text = ("  -h,--help                   Print\n  --clip,--grad-clip NORM     clip; not --this one\n  --strict    "
                "refuse. --no-strict takes it back\n  --resume [DIR]              goes on in --out\n")
        self.assertEqual(flags_of_help(text), {"--help", "--clip", "--grad-clip", "--strict", "--no-strict", "--resume"})
        self.assertGreater(len(self.listed["train"]), 50)

    def test_the_page_has_every_flag_of_the_program(self):
        named = set(FLAG.findall(self.page))
        missing = {f for f in self.all - named if not f.startswith("--no-")}
        self.assertEqual(missing, set(), "docs/cli.md does not name them")

    def test_the_page_has_no_flag_that_the_program_lacks(self):
        self.assertEqual(set(FLAG.findall(self.page)) - self.all, set(), "no subcommand has them")

    def test_the_page_has_every_subcommand(self):
        listed = set(re.findall(r"^  ([a-z]+) {2,}", run("--help").stdout.split("Subcommands:")[1], re.M))
        self.assertEqual(listed, set(SUBCOMMANDS))
        self.assertLessEqual(listed, set(re.findall(r"^\| `([a-z]+)` \|", self.page, re.M)))

    def test_flags_in_the_prose_of_all_pages_exist(self):
        tools = [p for folder in ("tools", "scripts", "bench") for p in (ROOT / folder).glob("*") if p.is_file()]
        known = self.all | OTHERS | FINETUNE | {f for p in tools for f in FLAG.findall(p.read_text(errors="ignore"))}
        for page in pages.user_pages(ROOT):
            for number, line in pages.split((ROOT / page).read_text())[0]:
                named = {f for span in pages.SPAN.findall(line) for f in FLAG.findall(span)}
                with self.subTest(where=f"{page}:{number}"):
                    self.assertEqual(named - known, set())

    def test_the_page_of_finetune_has_its_flags(self):
        page = (ROOT / "docs" / "from-a-chat-file.md").read_text()
        self.assertGreater(len(FINETUNE), 25)
        chat = {"--system", "--max-tokens", "--temperature", "--model"}
        self.assertEqual(set(FLAG.findall(page)) - FINETUNE - chat - {"--help", "--chat"}, set())
        self.assertEqual({name for name in FINETUNE if name not in page} - {"--split", "--seed", "--steps", "--device", "--offline", "--revision"}, set())

    def test_exit_codes_are_the_same_on_both_pages(self):
        table = re.compile(r"^\| (\d+|128\+n) \|", re.M)
        both = [table.findall((ROOT / "docs" / name).read_text()) for name in ("exit-codes.md", "getting-started.md")]
        self.assertEqual(both[0][:9], ["0", "1", "2", "3", "4", "5", "6", "7", "128+n"])
        self.assertIn(both[1], ([], both[0][:9]))


if __name__ == "__main__":
    unittest.main(verbosity=1)
