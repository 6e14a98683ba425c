"""Closed standard output or standard error: nothing that would go there lands in a file of tandem's own."""
import hashlib
import struct
import subprocess

from program import PROGRAM, SMALL, ProgramTest, main


class ClosedStreams(ProgramTest):
    def run_closed(self, closed, *arguments):
        """Runs the program with the streams closed that the shell's words name."""
        return subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", PROGRAM, *map(str, arguments)],
                              capture_output=True, text=True, timeout=300, env=self.environment())

    def digests_below(self, folder):
        return {str(p.relative_to(folder)): hashlib.md5(p.read_bytes()).hexdigest()
                for p in folder.rglob("*") if p.is_file()}

    def model_that_is_warned_of(self):
        self.succeed(self.train("--steps", "1", "--out", self.root / "run"))
        model = self.root / "model"
        self.succeed(self.run_program("export", self.root / "run", "--to", model, "--dtype", "fp32"))
        with (model / "model.safetensors").open("r+b") as tensors:
            tensors.seek(-4, 2)
            tensors.write(struct.pack("<f", float("nan")))
        return model

    def test_export(self):
        model = self.model_that_is_warned_of()
        result = self.succeed(self.run_program("export", model, "--to", self.root / "open"))
        self.assertIn("NaN", result.stderr)
        expected = self.digests_below(self.root / "open")
        for name, closed, code in [("err", "2>&-", 0), ("in-err", "<&- 2>&-", 0), ("out", ">&-", 7),
                                   ("all", "<&- >&- 2>&-", 7)]:
            with self.subTest(closed=closed):
                result = self.run_closed(closed, "export", model, "--to", self.root / name)
                self.assertEqual(result.returncode, code, result.stderr)
                self.assertEqual(self.digests_below(self.root / name), expected)

    def test_train(self):
        flags = ["train", "--model", "tiny-gpt2", "--data", self.text, *SMALL, "--steps", "2"]
        self.succeed(self.run_program(*flags, "--out", self.root / "open"))
        expected = self.digests_below(self.root / "open")
        for name, closed in [("err", "2>&-"), ("out", ">&-"), ("all", "<&- >&- 2>&-")]:
            with self.subTest(closed=closed):
                result = self.run_closed(closed, *flags, "--out", self.root / name)
                self.assertEqual(result.returncode, 0, result.stderr)
                found = self.digests_below(self.root / name)
                self.assertEqual(set(found), set(expected))
                for same in (".lock", "checkpoints/step-00000002/state.safetensors"):
                    self.assertEqual(found[same], expected[same], same)
                self.assertEqual([m["step"] for m in self.metrics(self.root / name)], [1, 2])
                self.assertEqual(self.summary(self.root / name)["steps"], 2)


if __name__ == "__main__":
    main()
