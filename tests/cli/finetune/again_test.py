"""`tandem finetune` given again after its end: it does nothing where all is there, and writes from its state what is not."""
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import FinetuneTest, main, write_llama  # noqa: E402

LORA = ["--lora-rank", "2", "--merged"]


class Again(FinetuneTest):
    def setUp(self):
        super().setUp()
        write_llama(self.model)

    def files(self):
        """Content of all files, and when each was written; but of the lock, which names the process."""
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in self.out.rglob("*")
                if path.is_file() and path.name != ".finetune.lock"}

    def contents(self):
        """Content of all files but the page, which says when it was made."""
        return {path.relative_to(self.out): content for path, (content, _) in self.files().items() if path.name != "report.html"}

    def again(self, *flags):
        """Another call, which trains and measures nothing."""
        done = self.succeed(self.finetune("--steps", "2", *flags))
        for words in ("step ", "engine: ", "this takes", "measuring"):
            self.assertNotIn(words, done.stdout)
        self.assertEqual(done.stdout.splitlines()[-1], f"next: tandem chat {self.out}")
        return done.stdout

    def test_all_is_there(self):
        for flags in ([], LORA):
            with self.subTest(flags=flags):
                shutil.rmtree(self.out, ignore_errors=True)
                self.succeed(self.finetune("--steps", "2", *flags))
                before = self.files()
                self.measured = None
                self.assertIn("all of which is done already", self.again(*flags))
                self.assertEqual(self.files(), before)
                del self.measured

    def test_a_folder_that_was_deleted(self):
        for flags, names in (([], ["model"]), (LORA, ["adapter"]), (LORA, ["model"]), (LORA, ["adapter", "model"])):
            with self.subTest(flags=flags, names=names):
                shutil.rmtree(self.out, ignore_errors=True)
                self.succeed(self.finetune("--steps", "2", *flags))
                before = self.contents()
                for name in names:
                    shutil.rmtree(self.out / name)
                said = self.again(*flags)
                for name in names:
                    self.assertIn(f"{self.out / name} is not there any more: it is written again", said)
                self.assertEqual(self.contents(), before)

    def test_a_chat_with_what_was_deleted(self):
        self.succeed(self.finetune("--steps", "1"))
        shutil.rmtree(self.out / "model")
        self.refused(self.tandem("chat", self.out, text=""), 2, "folder model is not there any more", "its `tandem finetune` again")

    def test_a_state_that_was_deleted(self):
        """Nothing can be written, and the line says why."""
        self.succeed(self.finetune("--steps", "1"))
        for name in ("model", "checkpoints"):
            shutil.rmtree(self.out / name)
        self.refused(self.finetune("--steps", "1"), 2, str(self.out))
        self.assertFalse((self.out / "model").exists())

    def test_a_report_that_was_deleted(self):
        self.succeed(self.finetune("--steps", "1"))
        (self.out / "report.html").unlink()
        self.succeed(self.finetune("--steps", "1"))
        self.assertTrue((self.out / "report.html").is_file())


if __name__ == "__main__":
    main()
