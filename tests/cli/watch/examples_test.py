"""Every configuration of examples/configurations is taken by `train`, and completion and man page know every flag."""
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import SMALL, ProgramTest, main  # noqa: E402

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples" / "configurations"


class Configurations(ProgramTest):
    def setUp(self):
        super().setUp()
        for name in ("text/train/a.txt", "text/held-out/a.txt"):
            self.file(name, self.text.read_text())
        for name in ("chat.bin", "chat-validation.bin", "code.bin"):
            self.file(name, bytes(i % 200 if i % 2 == 0 else 0 for i in range(20000)))
        (self.root / "fast-disk").mkdir()
        self.succeed(self.run_program("train", "--model", "tiny-llama", "--data", "text/train", *SMALL, "--steps", "1", "--out",
                                      "run", cwd=self.root))
        self.succeed(self.run_program("export", "run", "--to", "model", cwd=self.root))
        config = self.root / "model" / "config.json"
        config.write_text(config.read_text().replace("tandem_token_kind", "another_key"))

    def test_each_is_taken(self):
        files = sorted(EXAMPLES.glob("*.toml"))
        self.assertGreaterEqual(len(files), 5)
        for file in files:
            with self.subTest(file.name):
                result = self.succeed(self.run_program("train", "--config", file, "--dry-run", "--device", "host", cwd=self.root))
                self.assertIn("total", result.stdout)
                self.assertFalse((self.root / "runs").exists())
                self.assertIn(f"`{file.name}`", (EXAMPLES / "README.md").read_text())

    def test_one_that_is_wrong_is_noticed(self):
        wrong = self.file("wrong.toml", (EXAMPLES / "mix.toml").read_text() + "no-such-key = 1\n")
        self.refused(self.run_program("train", "--config", wrong, "--dry-run", cwd=self.root), 2, "no-such-key")


class Texts(ProgramTest):
    def text_of(self, kind):
        return self.succeed(self.run_program("completion", kind)).stdout

    def subcommands(self):
        help_text = self.succeed(self.run_program("--help")).stdout
        return re.findall(r"^  ([a-z]+) {2,}", help_text.split("Subcommands:")[1], re.M)

    def flags_of(self, command):
        help_text = self.succeed(self.run_program(command, "--help")).stdout
        return {f for line in re.findall(r"^  (?:-h,)?(--\S+)", help_text, re.M) for f in line.split(",")}

    def completed(self, *words):
        """Completions that bash offers for the last of the words."""
        script = self.text_of("bash") + f'''
COMP_WORDS=({" ".join(f"'{w}'" for w in ("tandem", *words))})
COMP_CWORD={len(words)}
compopt() {{ :; }}
_tandem
printf '%s\\n' "${{COMPREPLY[@]}}"
'''
        return set(self.succeed(subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=self.root)).stdout.split())

    def test_bash_completes_subcommands_flags_and_values(self):
        names = set(self.subcommands())
        self.assertGreater(len(names), 8)
        self.assertNotIn("completion", names)
        self.assertLessEqual(names, self.completed(""))
        for name in names:
            self.assertEqual(self.completed(name, "--"), self.flags_of(name), name)
        self.assertEqual(self.completed("export", "run", "--dtype", ""), {"bf16", "fp32"})
        self.assertEqual(self.completed("plan", "--profile", "12gb"), {"12gb-pcie4", "12gb-pcie4-3060"})
        self.assertIn("tiny-gpt2", self.completed("train", "--model", "tiny"))
        self.assertEqual(self.completed("train", "--data", "tex"), {"text.txt"})
        self.assertEqual(self.completed("train", "--lr", ""), set())
        self.assertIn("--resume", self.completed("train", "--resume", "--re"))
        self.assertEqual(self.completed("--log-level", "w"), {"warning"})

    def test_zsh_and_fish_have_every_flag(self):
        for kind, pattern in [("zsh", r"\*(--[a-z0-9-]+)\["), ("fish", r"-l ([a-z0-9-]+)")]:
            text = self.text_of(kind)
            found = {f if f.startswith("--") else "--" + f for f in re.findall(pattern, text)}
            for name in self.subcommands():
                self.assertLessEqual(self.flags_of(name), found, (kind, name))
            if shutil.which(kind):
                file = self.file(f"completion.{kind}", text)
                self.succeed(subprocess.run([kind, "-n", file], capture_output=True, text=True))

    def test_the_man_page_has_every_flag(self):
        page = self.text_of("man")
        plain = page.replace("\\-", "-")
        for name in self.subcommands():
            (section,) = re.findall(rf"^\.SS {name}\n([\s\S]*?)(?=^\.S[SH] )", plain, re.M)
            self.assertEqual(set(re.findall(r"\\fB(--[a-z0-9-]+)\\fR", section)), self.flags_of(name), name)
        if shutil.which("groff"):
            result = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-z", self.file("tandem.1", page)], capture_output=True, text=True)
            self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_refused(self):
        self.refused(self.run_program("completion", "csh"), 2, "csh")


if __name__ == "__main__":
    main()
