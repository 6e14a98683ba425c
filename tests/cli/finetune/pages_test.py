"""Commands `tandem finetune` and `tandem chat` of the pages, as they stand there but for a single step on the host, in the order of their page."""
import pathlib
import shlex
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import CHAT_TEMPLATE, CLI, FinetuneTest, main, records, write_llama  # noqa: E402

ROOT = CLI.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "docs"))
import pages  # noqa: E402

WITH_VALUE = ("--device-memory", "--host-memory")  # flags that other machines need


def commands():
    """(page, line, words) of each."""
    for page in pages.user_pages(ROOT):
        for number, language, lines in pages.split((ROOT / page).read_text())[1]:
            text = "\n".join(lines).replace("\\\n", " ")
            for line in text.splitlines() if language in ("", "sh") else ():
                if line.startswith(("tandem finetune ", "tandem chat ")) and "MODEL" not in line:
                    yield page, number, shlex.split(line, comments=True)[1:]


class Pages(FinetuneTest):
    def test_commands_of_pages(self):
        found = list(commands())
        self.assertGreater(len(found), 7)
        for at, (page, number, words) in enumerate(found):
            if at == 0 or found[at - 1][0] != page:  # folders are those of one page
                shutil.rmtree(self.root / "runs", ignore_errors=True)
                self.prepare()
            with self.subTest(where=f"{page}:{number}", command=" ".join(words)):
                if words[0] == "chat":
                    self.succeed(self.tandem(*words, "--max-tokens", "2", text="Which colour has car 0?\n"))
                    continue
                if "/" in words[1] and not (self.root / words[1]).exists():
                    self.cached(words[1])
                for flag in WITH_VALUE:
                    if flag in words:
                        del words[words.index(flag):words.index(flag) + 2]
                self.succeed(self.tandem(*words, "--device", "host", "--steps", "1"))

    def prepare(self):
        if not (self.root / "model").exists():
            write_llama(self.root / "model", CHAT_TEMPLATE)
        lines = self.write_records(records(), "chats.jsonl")
        lines.write_text(lines.read_text()[1:-1].replace("}, {\"conv", "}\n{\"conv"))
        shutil.copy(lines, self.root / "chat.jsonl")
        self.file("preferences.jsonl", '{"prompt": "Which colour? ", "chosen": "red", "rejected": "tan"}\n' * 20)


if __name__ == "__main__":
    main()
