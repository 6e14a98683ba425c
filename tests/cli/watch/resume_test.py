"""A run is resumed by its folder alone, from any folder, and says itself how to go on with it."""
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import PROGRAM, SMALL, TEXT, ProgramTest, main, wait_for  # noqa: E402


def commands_in(text):
    """Commands that a run shows: the indented lines."""
    return [shlex.split(line) for line in text.splitlines() if line.startswith("  ") and line.split()[0] == PROGRAM]


class ByFolder(ProgramTest):
    def begin(self, *arguments, out="run"):
        """A run in `began`, all of whose paths are relative to there."""
        self.began, self.here = self.root / "began", self.root / "here"
        self.file("began/text.txt", TEXT)
        self.file("began/held-out.txt", TEXT[:500])
        self.here.mkdir(exist_ok=True)
        return self.succeed(self.run_program("train", "--model", "tiny-gpt2", "--data", "text.txt", "--eval-data",
                                             "held-out.txt", *SMALL, "--out", out, *arguments, cwd=self.began))

    def test_goes_on_from_another_folder_to_the_same_bits(self):
        self.begin("--steps", "4", "--decay-steps", "4", out="straight")
        self.begin("--steps", "2", "--decay-steps", "4")
        run = self.began / "run"
        result = self.succeed(self.run_program("train", "--resume", run, "--steps", "4", cwd=self.here))
        self.assertIn("resumed from", result.stdout)
        one, two = self.summary(self.began / "straight"), self.summary(run)
        self.assertEqual(two["resumed_from_step"], 2)
        self.assertEqual((one["state_digest"], one["eval_loss"]), (two["state_digest"], two["eval_loss"]))
        self.assertEqual(list(self.here.iterdir()), [])

    def test_model_and_trace_are_found_too(self):
        self.begin("--steps", "1", out="base")
        trace = ["--trace", "trace.json"]
        self.succeed(self.run_program("train", "--model", "base", "--data", "text.txt", *SMALL, *trace, "--steps", "1", "--out",
                                      "tuned", cwd=self.began))
        (self.began / "trace.json").unlink()
        self.succeed(self.run_program("train", "--resume", self.began / "tuned", "--steps", "2", cwd=self.here))
        self.assertTrue((self.began / "trace.json").exists())

    def test_a_run_that_has_moved(self):
        self.begin("--steps", "2")
        moved = self.here / "moved"
        (self.began / "run").rename(moved)
        self.succeed(self.run_program("train", "--resume", moved, "--steps", "3"))
        self.assertEqual(self.summary(moved)["steps"], 3)
        self.assertFalse((self.began / "run").exists())

    def test_out_goes_first(self):
        self.begin("--steps", "2")
        other = self.here / "other"
        self.succeed(self.run_program("train", "--resume", self.began / "run", "--config", self.began / "run" / "config.toml",
                                      "--steps", "3", "--out", other))
        self.assertEqual((self.summary(other)["steps"], self.summary(self.began / "run")["steps"]), (3, 2))

    def test_what_is_no_run_is_refused(self):
        self.begin("--steps", "1")
        run = self.began / "run"
        self.refused(self.run_program("train", "--resume", self.root / "none"), 4, "none", "no such folder")
        self.refused(self.run_program("train", "--resume", self.here), 2, "no run")
        line = self.refused(self.run_program("train", "--resume", run / "checkpoints" / "step-00000001"), 2, "step-00000001")
        self.assertIn(f"--out {run}", line)

    def test_a_finished_one_says_so(self):
        self.begin("--steps", "2")
        result = self.succeed(self.run_program("train", "--resume", self.began / "run"))
        self.assertIn("finished: all 2 steps", result.stdout)
        self.assertNotIn("finished:", self.succeed(self.run_program("train", "--resume", self.began / "run", "--steps", "3")).stdout)

    def test_a_finished_one_speaks_of_the_flag_that_was_typed(self):
        self.begin("--steps", "2")
        run = self.began / "run"
        result = self.succeed(self.run_program("train", "--resume", run, "--epochs", "0.001"))
        self.assertIn("warning: --epochs 0.001, which is 1 steps: the run has 2 already", result.stderr)
        self.assertIn("a larger --epochs goes on", result.stdout)
        self.assertNotIn("--steps", result.stdout + result.stderr)
        result = self.succeed(self.run_program("train", "--resume", run, "--steps", "1"))
        self.assertIn("warning: --steps 1: the run has 2 already", result.stderr)
        self.assertIn("a larger --steps goes on", result.stdout)


class NextCommands(ProgramTest):
    def test_at_the_end(self):
        out = self.root / "it's a run"
        shown = commands_in(self.succeed(self.train("--steps", "1", "--out", out)).stdout)
        self.assertEqual([words[1] for words in shown], ["sample", "export"])
        for words in shown:
            self.succeed(self.run_program(*words[1:]))
        self.assertTrue((out / "exported" / "config.json").exists())
        self.assertEqual(commands_in(self.succeed(self.train("--steps", "1")).stdout), [])  # nothing is there to go on with
        quiet = self.succeed(self.train("--steps", "1", "--quiet", "--out", self.root / "quiet"))
        self.assertEqual(quiet.stdout, "")

    def test_after_a_signal(self):
        out = self.root / "run"
        process = self.start(out, "--steps", "100000", stdout=subprocess.PIPE)
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(self.metrics(out)) >= 2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 128 + signal.SIGINT)
        self.assertRegex(said, r"stopped by a signal after step \d+ of 100000\n")
        (resume,) = commands_in(said)
        self.assertEqual(resume[1:], ["train", "--resume", str(out)])
        stopped = len(self.metrics(out))
        self.succeed(self.run_program(*resume[1:], "--steps", str(stopped + 1)))
        self.assertEqual(self.summary(out)["resumed_from_step"], stopped)


class Best(ProgramTest):
    KEEP = ["--eval-every", "1", "--keep-best", "--keep", "1"]

    def test_said_while_training_and_exported(self):
        out = self.root / "run"
        result = self.succeed(self.train("--steps", "3", "--lr", "1e-3", *self.KEEP, "--eval-data", self.held_out(), "--out", out))
        losses = {m["step"]: m["eval_loss"] for m in self.metrics(out)}
        best = min(losses, key=losses.get)
        self.assertIn(f"step {best}: eval loss {losses[best]:.4f} is the lowest so far", result.stdout)
        newest, chosen = self.root / "newest", self.root / "best"
        said = self.succeed(self.run_program("export", out, "--best", "--to", chosen)).stdout
        self.assertIn(f"step {best}, eval loss {losses[best]:.4f}", said)
        self.succeed(self.run_program("export", out / "checkpoints" / f"step-{best:08}", "--to", newest))
        tensors = "model.safetensors"
        self.assertEqual((newest / tensors).read_bytes(), (chosen / tensors).read_bytes())

    def test_it_is_not_the_last_one(self):
        out = self.root / "run"
        held = self.file("other.txt", "".join(chr(33 + i * 7 % 90) for i in range(300)))  # training makes it worse
        result = self.succeed(self.train("--steps", "6", "--lr", "3e-2", *self.KEEP, "--eval-data", held, "--out", out))
        losses = {m["step"]: m["eval_loss"] for m in self.metrics(out)}
        best = min(losses, key=losses.get)
        self.assertLess(best, 6)
        self.assertIn(f"the best checkpoint is that of step {best}, eval loss {losses[best]:.4f}", result.stdout)
        (export,) = [words for words in commands_in(result.stdout) if "--best" in words]
        self.succeed(self.run_program(*export[1:]))
        last, tensors = self.root / "last", "model.safetensors"
        self.succeed(self.run_program("export", out, "--to", last))
        self.assertNotEqual((last / tensors).read_bytes(), (out / "exported" / tensors).read_bytes())

    def test_the_best_one_was_deleted(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "2", *self.KEEP, "--eval-data", self.held_out(), "--out", out))
        losses = {m["step"]: m["eval_loss"] for m in self.metrics(out)}
        best = out / "checkpoints" / f"step-{min(losses, key=losses.get):08}"
        if best.name == self.checkpoints(out)[-1]:
            newest = out / "checkpoints" / "step-00000003"
            self.succeed(self.run_program("train", "--resume", out, "--steps", "3", "--lr", "10"))
            self.assertTrue(newest.exists())
        shutil.rmtree(best)
        line = self.refused(self.run_program("export", out, "--best", "--to", self.root / "exported"), 4, "export", "--best",
                            best.name, "not there any more", "leave out --best")
        self.assertNotIn("--model", line)
        self.succeed(self.run_program("export", out, "--to", self.root / "exported"))

    def test_refused_where_none_is_known(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--out", out))
        to = ["--to", self.root / "exported"]
        self.refused(self.run_program("export", out, "--best", *to), 2, "--best", "--keep-best")
        self.refused(self.run_program("export", out / "checkpoints" / "step-00000001", "--best", *to), 2, "no run")
        self.refused(self.run_program("export", self.root / "none", "--best", *to), 2, "no run")


if __name__ == "__main__":
    main()
