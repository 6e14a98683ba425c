"""Several sources of data with weights: what is drawn of each, that no setting changes it, and that it resumes to the bit."""
import json
import os
import signal
import struct
import subprocess

from program import PROGRAM, ProgramTest, main, wait_for


class Mixing(ProgramTest):
    def tokens(self, name, first, count=2000, **description):
        """A file of ids from `first` on: those of two files tell where a window comes from."""
        path = self.file(f"{name}.bin", struct.pack(f"<{count}H", *[first + i * i % 97 for i in range(count)]))
        if description:
            self.file(f"{name}.json", json.dumps({"dtype": "uint16", **description}))
        return path

    def setUp(self):
        super().setUp()
        self.a, self.b = self.tokens("a", 0), self.tokens("b", 128, 600)

    def run_mix(self, out, *flags, mix=None, steps=8):
        mix = ["--mix", mix or f"{self.a}=0.7,{self.b}=0.3"]
        return self.run_program("train", "--model", "tiny-gpt2", *mix, "--device", "host", "--threads", "1", "--seq-len", "32",
                                "--steps", steps, "--out", self.root / out, *flags)

    def digest(self, out, *flags, **more):
        self.succeed(self.run_mix(out, *flags, **more))
        return self.summary(self.root / out)["state_digest"]

    def sampler(self, out):
        newest = max((self.root / out / "checkpoints").glob("step-*"))
        return json.loads((newest / "manifest.json").read_text())["sampler"]

    def test_windows_come_by_weight(self):
        result = self.succeed(self.run_mix("out", "--micro-batch", "8", "--grad-accum", "8", steps=20))
        self.assertIn("70% of the windows", result.stderr + result.stdout)
        sampler = self.sampler("out")
        drawn = [p["epoch"] * p["windows"] + p["position"] for p in sampler["mix"]]
        self.assertEqual(sum(drawn), 20 * 64)
        self.assertAlmostEqual(drawn[0] / sum(drawn), 0.7, delta=0.05)
        self.assertGreater(sampler["mix"][1]["epoch"], 5)  # used up, and begun again
        self.assertEqual([p["share"] for p in sampler["mix"]], [0.7, 0.3])
        self.assertEqual(sampler["windows"], 62 + 18)

    def test_weights_are_shares_whatever_they_add_up_to(self):
        one = self.digest("one")
        self.assertEqual(self.digest("two", mix=f"{self.a}=7,{self.b}=3"), one)
        self.assertNotEqual(self.digest("three", mix=f"{self.a}=0.3,{self.b}=0.7"), one)
        self.assertNotEqual(self.digest("four", "--seed", "7"), one)

    def test_a_mix_of_one_is_its_data(self):
        plain = self.root / "plain"
        self.succeed(self.run_program("train", "--model", "tiny-gpt2", "--data", self.a, "--device", "host", "--threads", "1",
                                      "--seq-len", "32", "--steps", "8", "--out", plain))
        self.assertEqual(self.digest("mix", mix=f"{self.a}=2"), self.summary(plain)["state_digest"])
        self.succeed(self.run_mix("mix", "--resume", mix=f"{self.a}=1", steps=9))

    def test_no_setting_changes_what_is_learnt(self):
        flags = ["--grad-accum", "2"]
        one = self.digest("one", *flags)
        for i, more in enumerate([["--policy", "host"], ["--policy", "stream"], ["--policy", "static:0.5"],
                                  ["--device", "host,host"]]):
            self.assertEqual(self.digest(f"other-{i}", *flags, *more), one, more)

    def test_resumes_to_the_bit(self):
        straight = self.digest("straight", steps=30)
        self.succeed(self.run_mix("parts", "--decay-steps", "30", steps=11))
        self.succeed(self.run_mix("parts", "--decay-steps", "30", "--resume", steps=30))
        whole = self.digest("whole", "--decay-steps", "30", steps=30)
        self.assertEqual(self.summary(self.root / "parts")["state_digest"], whole)
        self.assertEqual(straight, whole)
        self.assertEqual(self.sampler("parts"), self.sampler("whole"))

    def test_a_killed_run_goes_on_as_if_it_had_not_been(self):
        whole = self.digest("whole", "--checkpoint-every", "2", steps=60)
        arguments = ["train", "--model", "tiny-gpt2", "--mix", f"{self.a}=0.7,{self.b}=0.3", "--device", "host", "--threads",
                     "1", "--seq-len", "32", "--steps", "60", "--checkpoint-every", "2", "--out", self.root / "killed"]
        process = subprocess.Popen([PROGRAM, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        wait_for(lambda: process.poll() is not None or list(self.root.glob("killed/checkpoints/step-*")))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self.succeed(self.run_program("train", "--resume", "--out", self.root / "killed"))
        self.assertEqual(self.summary(self.root / "killed")["state_digest"], whole)

    def test_the_configuration_repeats_it(self):
        one = self.digest("one")
        toml = self.root / "one" / "config.toml"
        self.assertIn(f'mix = ["{self.a}=0.7", "{self.b}=0.3"]', toml.read_text())
        self.succeed(self.run_program("train", "--config", toml, "--out", self.root / "again"))
        self.assertEqual(self.summary(self.root / "again")["state_digest"], one)
        # Flags win: --data takes the place of the file's mix.
        self.succeed(self.run_program("train", "--config", toml, "--out", self.root / "data", "--data", self.a))
        self.assertNotIn("mix", (self.root / "data" / "config.toml").read_text())

    def test_an_epoch_is_as_many_windows_as_all_have(self):
        self.succeed(self.run_program("train", "--model", "tiny-gpt2", "--mix", f"{self.a}=1,{self.b}=1", "--epochs", "0.5",
                                      "--seq-len", "32", "--device", "host", "--threads", "1", "--out", self.root / "out"))
        self.assertEqual(self.summary(self.root / "out")["steps"], 40)

    def test_rows_and_plan(self):
        rows = dict(layout="rows", row_length=33)
        a, b = self.tokens("ra", 0, 33 * 20, **rows), self.tokens("rb", 128, 33 * 5, **rows)
        plan = self.succeed(self.run_program("plan", "--model", "tiny-gpt2", "--mix", f"{a}=1,{b}=1", "--device", "host"))
        self.assertIn("sequences of 32", plan.stdout)
        self.succeed(self.run_mix("rows", mix=f"{a}=1,{b}=1"))
        other = self.tokens("rc", 0, 17 * 5, layout="rows", row_length=17)
        self.refused(self.run_mix("x", mix=f"{a}=1,{other}=1"), 4, "--mix", str(other), "layout")
        self.refused(self.run_mix("x", mix=f"{a}=1,{self.b}=1"), 4, "--mix", str(self.b), "layout")
        packed = self.tokens("packed", 0, 33 * 5, layout="packed", row_length=33)
        self.file("packed.mask.bin", (b"\2" + b"\1" * 32) * 5)
        self.refused(self.run_mix("x", mix=f"{a}=1,{packed}=1"), 4, "--mix", str(packed), "layout")

    def test_what_is_no_mix(self):
        a, b = self.a, self.b
        for mix, code, words in [
                (f"{a}=0.7,{b}=0", 2, ["--mix", "from 1e-9 to 1e9"]), (f"{a}=-1,{b}=1", 2, ["--mix", "from 1e-9 to 1e9"]),
                (f"{a}=x,{b}=1", 2, ["--mix"]), (f"{a}=nan,{b}=1", 2, ["--mix"]), (f"{a}=inf", 2, ["--mix"]),
                (f"{a}=1e308,{b}=1e308", 2, ["from 1e-9 to 1e9"]), (f"{a}=1e-300,{b}=1", 2, ["from 1e-9 to 1e9"]),
                (f"{a}=1,{a.parent}/./{a.name}=2", 2, ["--mix", "twice"]),
                (f"{a},{b}", 2, ["--mix", "weight"]), (f"{a}=1,", 2, ["--mix", "weight"]), ("=1", 2, ["--mix", "no path"]),
                (f"{a}=1,{a}=2", 2, ["--mix", "twice"]), (f"{a}=1,{self.root}/none=1", 4, ["none", "no such file"]),
                (f"{a}=1,{self.text}=1", 4, ["--mix", "mixed"]),
                (f"{a}=1,{self.tokens('short', 0, 20)}=1", 4, ["short.bin", "shorter than one sequence"])]:
            with self.subTest(mix=mix):
                self.refused(self.run_mix("x", mix=mix), code, *words)
        self.refused(self.run_mix("x", "--data", a), 2, "--data and --mix", "both given")
        self.assertFalse((self.root / "x").exists())

    def test_commas_belong_to_paths_that_have_them(self):
        odd = self.file("odd, name=1.bin", self.a.read_bytes())
        self.assertEqual(self.digest("odd", mix=f"{odd}=0.7,{self.b}=0.3"), self.digest("even"))
        self.succeed(self.run_program("train", "--config", self.root / "odd" / "config.toml", "--out", self.root / "again"))

    def test_another_mix_is_not_resumed(self):
        self.digest("out", steps=3)
        a, b = self.a, self.b
        for mix, words in [(f"{a}=0.6,{b}=0.4", ["--mix", "a mix of 0.7 to 0.3"]), (f"{a}=1", ["--mix", "a mix of 0.7 to 0.3"]),
                           (f"{b}=0.7,{a}=0.3", ["place in the data"]),
                           (f"{a}=0.7,{self.tokens('c', 99, 600)}=0.3", ["--mix", "content is other"])]:
            with self.subTest(mix=mix):
                self.refused(self.run_mix("out", "--resume", mix=mix, steps=5), 4, *words)
        result = self.run_program("train", "--resume", "--out", self.root / "out", "--data", a, "--steps", "5")
        self.refused(result, 4, "--data", "a mix of 0.7 to 0.3")
        self.succeed(self.run_mix("out", "--resume", steps=5))


if __name__ == "__main__":
    main()
