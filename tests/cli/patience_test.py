"""`train --patience`: a run ends after so many evaluations without a lower loss, at the same step however often it was interrupted."""
import json
import signal
import subprocess

from program import HELD_OUT, ProgramTest, main, wait_for

OTHER = "".join(chr(33 + i * 7 % 90) for i in range(300))  # training makes its loss worse
STEPS = 40


class Patience(ProgramTest):
    def flags(self, *more, held_out=None):
        return ["--steps", STEPS, "--lr", "3e-2", "--eval-data", held_out or self.file("other.txt", OTHER), "--eval-every", "2", *more]

    def losses(self, out):
        return {m["step"]: m["eval_loss"] for m in self.metrics(out) if "eval_loss" in m}

    def checkpoint(self, out, step):
        return out / "checkpoints" / f"step-{step:08}"

    def evaluations(self, out, step):
        return json.loads((self.checkpoint(out, step) / "manifest.json").read_text()).get("evaluations")

    def test_it_ends_the_run_and_is_remembered(self):
        straight = self.root / "straight"
        said = self.succeed(self.train(*self.flags("--patience", "2", "--checkpoint-every", "1", "--keep", "0"), "--out", straight)).stdout
        losses, summary = self.losses(straight), self.summary(straight)
        best = min(losses, key=losses.get)
        self.assertEqual(list(losses), list(range(2, best + 5, 2)))
        self.assertEqual((summary["steps"], summary["ended_by"]), (best + 4, "patience"))
        self.assertLess(best + 4, STEPS)
        self.assertIn(f"ended by --patience after step {best + 4} of {STEPS}: 2 evaluations in a row without a lower loss than "
                      f"{losses[best]:.4f}", said)
        self.assertEqual(self.evaluations(straight, best + 3), {"last_step": best + 2, "lowest_loss": losses[best], "without_gain": 1})
        for step in (best - 1, best, best + 2, best + 3):
            with self.subTest(resumed_from=step):
                broken = self.root / f"from-{step}"
                self.succeed(self.train(*self.flags("--patience", "2"), "--resume", self.checkpoint(straight, step), "--out", broken))
                self.assertEqual({key: self.summary(broken)[key] for key in ("steps", "ended_by", "state_digest")},
                                 {key: summary[key] for key in ("steps", "ended_by", "state_digest")})
        self.check_it_is_over(straight, best + 4)

    def check_it_is_over(self, out, step):
        """Resumed as it is it takes no step; with more patience, or none, it goes on."""
        self.succeed(self.run_program("train", "--resume", out))
        self.assertEqual((self.summary(out)["steps"], self.summary(out)["ended_by"]), (step, "patience"))
        self.succeed(self.run_program("train", "--resume", out, "--patience", "3"))
        self.assertGreater(self.summary(out)["steps"], step)
        self.succeed(self.run_program("train", "--resume", out, "--patience", "0"))
        self.assertEqual((self.summary(out)["steps"], self.summary(out)["ended_by"]), (STEPS, "steps"))

    def test_an_evaluation_that_a_signal_broke_off_is_made_up(self):
        held_out = self.file("long.txt", OTHER * 60)
        flags = self.flags("--patience", "2", "--keep-best", held_out=held_out)
        straight, broken = self.root / "straight", self.root / "broken"
        self.succeed(self.train(*flags, "--out", straight))
        last = self.summary(straight)["steps"]
        for attempt in range(5):
            process = self.start(broken, *flags, *(["--resume"] if attempt else []), stdout=subprocess.DEVNULL)
            seen = len(self.metrics(broken)) if (broken / "metrics.jsonl").exists() else 0
            wait_for(lambda: (broken / "metrics.jsonl").exists() and len(self.metrics(broken)) > seen and len(self.metrics(broken)) % 2 == 1)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(120), 128 + signal.SIGINT)
            step = self.summary(broken)["steps"]
            self.assertEqual(self.summary(broken)["ended_by"], "signal")
            if step % 2 == 0 and (self.evaluations(broken, step) or {"last_step": 0})["last_step"] < step:
                break  # saved without its evaluation
        else:
            self.fail("no evaluation was broken off")
        self.succeed(self.run_program("train", "--resume", broken))
        for key in ("steps", "ended_by", "state_digest"):
            self.assertEqual(self.summary(broken)[key], self.summary(straight)[key], key)
        best = [(self.root / name / "checkpoints").iterdir() for name in ("straight", "broken")]
        self.assertEqual(*[sorted(path.name for path in found) for found in best])
        self.assertEqual(last, self.summary(broken)["steps"])

    def test_a_run_that_gains_takes_all_steps(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "4", "--lr", "1e-3", "--eval-data", self.file("held-out.txt", HELD_OUT), "--eval-every", "1",
                                "--patience", "1", "--out", out))
        self.assertEqual((self.summary(out)["steps"], self.summary(out)["ended_by"]), (4, "steps"))


if __name__ == "__main__":
    main()
