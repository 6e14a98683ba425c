"""`tandem finetune` that is killed at random moments, or ended by a signal, and called again: the weights are those of a run that
was not interrupted, to the bit. TANDEM_TEST_KILLS says how many kills."""
import fcntl
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import FinetuneTest, main, wait_for, write_llama  # noqa: E402

KILLS = int(os.environ.get("TANDEM_TEST_KILLS", "3"))
FLAGS = ["--epochs", "30", "--validation", "0.1", "--eval-every", "20", "--patience", "6"]


class Killed(FinetuneTest):
    straight = None  # summary and weights of a run that was not interrupted, and the seconds that it took

    def setUp(self):
        super().setUp()
        write_llama(self.model)
        if Killed.straight is None:
            begin = time.monotonic()
            self.succeed(self.finetune(*FLAGS))
            Killed.straight = self.summary(self.out), self.tensors(), time.monotonic() - begin
            shutil.rmtree(self.out)

    def begin(self, *more, flags=FLAGS):
        process = subprocess.Popen([sys.executable, "-m", "tandem.program", *map(str, self.command(*flags, *more))], env=self.environment(),
                                   cwd=self.root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def check(self):
        done = self.succeed(self.finetune(*FLAGS))
        self.assertEqual(done.stdout.splitlines()[-1], f"next: tandem chat {self.out}")
        summary, tensors, _ = self.straight
        self.assertEqual(self.tensors(), tensors)
        for name in ("steps", "ended_by", "state_digest"):
            self.assertEqual(self.summary(self.out)[name], summary[name], name)

    def test_the_same_weights_after_kills(self):
        draw, stages = random.Random(KILLS), []
        for number in range(KILLS):
            process = self.begin()
            # One moment in each part of a whole run, so that no stage is left out.
            time.sleep(self.straight[2] * (number % 3 + draw.random()) / 3)
            process.kill()
            stages.append(self.stage())
            if process.wait() == 0 or (self.out / "model").exists():
                self.check()
                shutil.rmtree(self.out)
        self.check()
        print("killed while there were:", ", ".join(stages))

    def test_the_same_weights_after_a_kill_in_each_stage(self):
        """Killed as soon as a file of the stage is there; and while the settings are written, which takes no time to wait for."""
        for name in ("tokenizer", "data/train.parts", "stages/prepared.json", "stages/choices.json", "finetune.toml", "stages/schedule.json",
                     "config.toml", "checkpoints/step-00000020", "summary.json", ".model.part", "model", "stages/model.json"):
            process = self.begin()
            while process.poll() is None and not (self.out / name).exists():
                time.sleep(0.001)
            process.kill()
            process.wait()
            self.assertTrue((self.out / name).exists() or process.returncode < 0, name)
            if name == "stages/choices.json" and not (self.out / "finetune.toml").exists():
                (self.out / ".finetune.toml.part").write_text("model = ")
        self.check()

    def test_an_adapter_and_the_model_it_is_merged_into(self):
        """Killed while each of both is written, and between them."""
        flags = ["--steps", "40", "--eval-every", "20", "--lora-rank", "4", "--base", "nf4", "--merged"]
        results = [self.out / name for name in ("adapter/adapter_model.safetensors", "adapter/chat_template.jinja", "model/model.safetensors")]
        self.succeed(self.finetune(*flags))
        straight = [path.read_bytes() for path in results]
        shutil.rmtree(self.out)
        for name in ("checkpoints/step-00000020", ".adapter.part", "adapter", "stages/adapter.json", ".model.part", "model"):
            process = self.begin(flags=flags)
            while process.poll() is None and not (self.out / name).exists():
                time.sleep(0.001)
            process.kill()
            process.wait()
            self.assertTrue((self.out / name).exists() or process.returncode < 0, name)
        self.succeed(self.finetune(*flags))
        self.assertEqual([path.read_bytes() for path in results], straight)

    def test_folders_that_are_written_again(self):
        """Deleted after the end, and killed while they are written anew: what has the name is whole."""
        flags = ["--steps", "10", "--lora-rank", "4", "--merged"]
        self.succeed(self.finetune(*flags))
        straight = self.results()
        for name in ("adapter", "model"):
            for moment in (f".{name}.part", f".{name}.part/chat_template.jinja", name):
                shutil.rmtree(self.out / name, ignore_errors=True)
                process = self.begin(flags=flags)
                while process.poll() is None and not (self.out / moment).exists():
                    time.sleep(0.0005)
                process.kill()
                process.wait()
                self.assertEqual(self.results(), {path: content for path, content in straight.items()
                                                  if path.parts[0] != name or (self.out / name).exists()}, moment)
        self.succeed(self.finetune(*flags))
        self.assertEqual(self.results(), straight)

    def results(self):
        """Files of the folders that a run ends with."""
        return {path.relative_to(self.out): path.read_bytes() for name in ("adapter", "model") for path in (self.out / name).rglob("*")
                if path.is_file()}

    def stage(self):
        """The last stage whose file is there."""
        files = {"model": "model", "steps": "metrics.jsonl", "schedule": "stages/schedule.json", "token files": "stages/prepared.json",
                 "settings": "finetune.toml"}
        return next((name for name, file in files.items() if (self.out / file).exists()), "nothing")

    def test_a_signal_saves_and_the_next_call_goes_on(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                process = self.begin()
                wait_for(lambda: (self.out / "metrics.jsonl").exists() and len(self.metrics(self.out)) > 5)
                process.send_signal(number)
                _, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 128 + number)
                self.assertIn("the same command goes on", errors)
                self.assertEqual(self.summary(self.out)["ended_by"], "signal")
                self.check()
                shutil.rmtree(self.out)

    def test_nothing_is_left_at_work(self):
        process = self.begin("--steps", "1000000", flags=[])
        wait_for(lambda: (self.out / "metrics.jsonl").exists() and len(self.metrics(self.out)) > 5)
        process.kill()
        with (self.out / ".finetune.lock").open() as lock:
            wait_for(lambda: self.is_free(lock), seconds=5)

    def is_free(self, lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def test_two_calls_at_once(self):
        first = self.begin()
        wait_for(lambda: (self.out / "metrics.jsonl").exists())
        self.refused(self.finetune(*FLAGS), 7, "another call is at work")
        first.kill()


if __name__ == "__main__":
    main()
