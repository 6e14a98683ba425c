"""Ranks in several processes train to the bits of one, leave its files, and end together: with a checkpoint on a signal, and
within seconds, with the name of the one that is gone, where one is killed. Mistakes of a launch are named on all."""
import itertools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from launches import ProcessesTest, WORK, free_port, rank_environment  # noqa: E402
from program import PROGRAM, main, wait_for  # noqa: E402


class OneCourse(ProcessesTest):
    def check(self, *flags, processes=(2,), ways=([],), **more):
        one = self.train_in(1, "--steps", "3", *flags, **more)
        expected = self.course(one)
        folders = [one]
        for way, count in itertools.product(ways, processes):
            with self.subTest(flags=flags, way=way, processes=count, **more):
                folders.append(self.train_in(count, "--steps", "3", *flags, *way, **more))
                self.assertEqual(self.course(folders[-1]), expected)
        return folders

    def test_whatever_the_policy(self):
        folders = self.check("--eval-data", self.held_out(), "--eval-every", "2", processes=(2, 4),
                             ways=[["--policy", "interleave:2,resident=0.4"],
                                   ["--policy", "host", "--subgroup-size", "4097", "--accumulation-order", "layer"]])
        states = {(out / "checkpoints" / "step-00000003" / "state.safetensors").read_bytes() for out in folders}
        self.assertEqual(len(states), 1)
        for out in folders[1:]:
            summary = self.summary(out)
            self.assertEqual(sum(summary["updated_parameters"].values()), 3 * summary["parameters"])
            self.assertEqual(summary["peak_device_bytes"], summary["planned_device_bytes"])
            self.assertLessEqual(summary["peak_host_bytes"], summary["planned_host_bytes"])
            self.assertEqual(summary["device"].count("host"), summary["ranks"])
            logs = sorted(path.name for path in (out / "ranks").iterdir())
            self.assertEqual(logs, [f"rank-{rank}.log" for rank in range(summary["ranks"])])
            for log in logs:
                self.assertIn("step 3 loss", (out / "ranks" / log).read_text())

    def test_as_many_devices_in_one_process_move_as_much(self):
        out = self.new_out()
        self.succeed(self.run_program(*self.command("--steps", "3", "--policy", "host"), "--device", "host,host", "--out", out))
        apart = self.train_in(2, "--steps", "3", "--policy", "host")
        for key in ("state_digest", "updated_parameters"):
            self.assertEqual(self.summary(apart)[key], self.summary(out)[key])
        for key in ("h2d", "d2h", "peers"):
            self.assertEqual(self.summary(apart)["bytes"][key], self.summary(out)["bytes"][key])
        # Another process, and 8 MiB on the way of each rank's bytes.
        more = self.summary(apart)["planned_host_bytes"] - self.summary(out)["planned_host_bytes"]
        self.assertGreaterEqual(more, (16 + 2 * 8) << 20)

    def test_updates_that_are_taken_back(self):
        self.check("--speculate", "on", "--clip", "0.9", "--policy", "host")

    def test_experts_and_embeddings_that_are_not_tied(self):
        self.check("--policy", "interleave:2", model="tiny-moe")
        self.check("--policy", "stream", "--state", "bf16-moments", model="tiny-llama")

    def test_adapters(self):
        self.check("--lora-rank", "4", "--policy", "host")

    def test_a_loss_that_is_evaluated_and_kept_as_the_best(self):
        folders = self.check("--eval-data", self.held_out(), "--eval-every", "1", "--keep-best", "--checkpoint-every", "1")
        self.assertEqual({tuple(self.checkpoints(out)) for out in folders}, {tuple(self.checkpoints(folders[0]))})


class Checkpoints(ProcessesTest):
    def test_resumed_by_another_number_of_processes_and_in_one(self):
        flags = ["--steps", "4", "--checkpoint-every", "2", "--keep", "0"]
        expected = self.course(self.train_in(1, *flags))
        for before, behind in [(2, 1), (1, 2), (4, 2)]:
            with self.subTest(before=before, behind=behind):
                second = self.train_in(before, *flags) / "checkpoints" / "step-00000002"
                out = self.new_out()
                run = self.command("--steps", "4", "--policy", "host", "--resume", second, "--strict")
                self.succeed(self.run_in(behind, *run, "--out", out))
                steps, end = self.course(out)
                self.assertEqual((self.summary(out)["resumed_from_step"], steps, end), (2, expected[0][2:], expected[1]))

    def test_a_run_of_several_devices_in_several_processes_and_back(self):
        flags = ["--steps", "4", "--checkpoint-every", "2", "--keep", "0"]
        expected = self.course(self.train_in(1, *flags))
        out = self.new_out()
        self.succeed(self.run_program(*self.command(*flags), "--device", "host,host", "--out", out))
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        apart = self.succeed(self.run_in(2, "train", "--resume", out))
        self.assertEqual(apart.stderr.count("--device host: the run had --device host,host, and goes on in 2 processes"), 1)
        self.assertEqual((self.summary(out)["processes"], self.summary(out)["resumed_from_step"]), (2, 2))
        self.assertEqual(self.course(out), expected)
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        self.succeed(self.run_program("train", "--resume", out))
        self.assertEqual((self.summary(out)["processes"], self.summary(out)["resumed_from_step"]), (1, 2))
        self.assertEqual(self.course(out), expected)

    def test_back_to_an_earlier_one_by_all(self):
        out = self.train_in(2, "--steps", "4", "--checkpoint-every", "1", "--keep", "0")
        expected = self.course(out)
        second = out / "checkpoints" / "step-00000002"
        elsewhere = self.root / "elsewhere" / "step-00000002"
        shutil.copytree(second, elsewhere)
        for resumed in (second, elsewhere):
            self.succeed(self.run_in(2, *self.command("--steps", "4", "--checkpoint-every", "1", "--keep", "0", "--resume", resumed),
                                     "--out", out))
            self.assertEqual(self.course(out), expected)
            shutil.rmtree(second)

    def test_damage_that_is_passed_over_by_all(self):
        out = self.train_in(2, "--steps", "3", "--checkpoint-every", "1")
        expected = self.course(out)
        damaged = out / "checkpoints" / "step-00000003" / "state.safetensors"
        with damaged.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"damage")
        shown = self.succeed(self.run_in(2, *self.command("--steps", "3", "--checkpoint-every", "1", "--resume"), "--out", out))
        self.assertIn("passed over", shown.stderr)
        self.assertEqual(self.course(out), expected)

    def test_a_disk_without_room_ends_all_and_leaves_the_checkpoint_before(self):
        out = self.train_in(2, "--steps", "2")
        words = self.command("--steps", "6", "--checkpoint-every", "2", "--resume", "--out", out)
        limited = ["bash", "-c", 'ulimit -f 1024; exec "$0" "$@"', PROGRAM]
        full = subprocess.run([*limited, "launch", "--processes", "2", "--", *map(str, words)], capture_output=True, text=True,
                              timeout=60, env=self.environment())
        self.assertEqual(full.returncode, 7, full.stderr)
        self.assertIn("[1] tandem: error: rank 0 failed: cannot write", full.stderr)
        self.assertEqual(self.checkpoints(out), ["step-00000002"])
        going_on = subprocess.run([*limited, "launch", "--processes", "2", "--", *map(str, words), "--on-save-failure",
                                   "continue"], capture_output=True, text=True, timeout=60, env=self.environment())
        self.assertEqual(going_on.returncode, 7, going_on.stderr)
        self.assertIn("checkpoint of step 4 failed, the run goes on", going_on.stderr)


class Ends(ProcessesTest):
    def endless(self, out, *flags):
        return self.command("--steps", "1000000", "--checkpoint-every", "3", *flags, "--out", out)

    def begun(self, out, count=2, *flags):
        processes = self.ranks(self.endless(out, *flags), count)
        wait_for(lambda: list(out.glob("checkpoints/step-*")) or any(p.poll() is not None for p in processes))
        return processes

    def test_a_killed_rank_is_named_by_all_others_within_seconds(self):
        for killed in range(3):
            with self.subTest(killed=killed):
                out = self.new_out()
                processes = self.begun(out, 3, "--grad-accum", "3")
                processes[killed].kill()
                begin = time.monotonic()
                ends = self.ends_of(processes)
                self.assertLess(time.monotonic() - begin, 5.0)
                for rank in range(3):
                    if rank != killed:
                        self.assertEqual(ends[rank][0], 5, ends[rank])
                        self.assertIn(f"rank {killed} at 127.0.0.1", ends[rank][1])

    def test_a_norm_that_is_not_finite_ends_all_behind_the_step_before(self):
        out = self.new_out()
        words = self.command("--steps", "3", "--lr", "1e30", "--lr-schedule", "constant", "--on-nonfinite", "stop", "--out", out)
        at = words.index("--lr")
        for code, line in self.ends_of(self.ranks(words[:at] + words[at + 2:])):
            self.assertEqual(code, 6, line)
            self.assertIn("update 2: the gradient norm is not finite", line)
        self.assertEqual(self.checkpoints(out), ["step-00000001"])

    def test_a_signal_to_one_saves_and_ends_all(self):
        for number, told in [(signal.SIGTERM, [1]), (signal.SIGINT, [0, 1])]:
            out = self.new_out()
            processes = self.begun(out)
            for rank in told:
                processes[rank].send_signal(number)
            self.assertEqual([code for code, _ in self.ends_of(processes)], [128 + number] * 2)
            summary = self.summary(out)
            self.assertEqual(self.checkpoints(out)[-1], f"step-{summary['steps']:08}")
            self.assertEqual(self.succeed(self.run_program("digest", out)).stdout.strip(), summary["state_digest"])

    def test_a_rank_that_stands_still_is_named(self):
        processes = self.begun(self.new_out())
        processes[1].send_signal(signal.SIGSTOP)
        (code, line), _ = self.ends_of(processes[:1])[0], processes[1].kill()
        self.assertEqual(code, 5, line)
        self.assertIn("rank 1 at 127.0.0.1", line)
        self.assertIn("no sign of life", line)

    def test_the_launcher_passes_lines_signals_and_codes_on(self):
        out = self.new_out()
        launcher = subprocess.Popen([PROGRAM, "launch", "--processes", "2", "--", *map(str, self.endless(out))],
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment())
        self.end_after_the_test(launcher)
        wait_for(lambda: list(out.glob("checkpoints/step-*")) or launcher.poll() is not None)
        launcher.send_signal(signal.SIGTERM)
        shown, errors = launcher.communicate(timeout=60)
        self.assertEqual(launcher.returncode, 128 + signal.SIGTERM, errors)
        self.assertIn("[0] stopped by a signal after step", shown)
        self.assertNotIn("[1] ", shown)
        refused = self.run_in(2, *self.command("--steps", "1", "--no-such-flag"))
        self.assertEqual(refused.returncode, 2)
        self.assertIn("[1] tandem: error:", refused.stderr)

    def test_ranks_end_with_their_launcher(self):
        out = self.new_out()
        launcher = subprocess.Popen([PROGRAM, "launch", "--processes", "2", "--", *map(str, self.endless(out))],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.environment())
        self.addCleanup(launcher.wait)
        wait_for(lambda: list(out.glob("checkpoints/step-*")) or launcher.poll() is not None)
        launcher.kill()
        wait_for(lambda: (out / "summary.json").exists(), 30)


class Refused(ProcessesTest):
    def test_ranks_that_mean_different_runs(self):
        out = ["--out", self.root / "out"]
        words = self.command("--steps", "2", *out)
        other = self.file("other.txt", "Other text of other length. " * 200)
        for rank1, named in [(["--lr", "2e-3"], ["--lr", "'0.001' (rank 0)", "'0.002' (rank 1)"]),
                             (["--grad-accum", "2"], ["--grad-accum"]), (["--data", other], ["data"]),
                             (["--model", "tiny-llama"], ["model"]), (["--threads", "2"], ["threads"])]:
            with self.subTest(rank1=rank1):
                self.refused_on_all(2, "ranks differ in", *named, words=self.without(words, rank1[0]),
                                    each=lambda rank: rank1 if rank == 1 else self.given(words, rank1[0]))
                self.assertFalse((self.root / "out").exists())

    def without(self, words, flag):
        at = words.index(flag)
        return words[:at] + words[at + 2:]

    def given(self, words, flag):
        at = words.index(flag)
        return words[at:at + 2]

    def test_weights_that_differ(self):
        one, two = (self.train_in(1, "--steps", steps) for steps in ("1", "2"))
        words = ["train", "--data", self.text, *WORK, "--steps", "2"]
        self.refused_on_all(2, "ranks differ in weights at the start", words=words,
                            each=lambda rank: ["--model", [one, two][rank]])

    def test_a_model_in_folders_of_other_names(self):
        """Each machine may have its copy where it likes: one that is the same is no other model."""
        one = self.root / "one"
        self.succeed(self.run_program("export", self.train_in(1, "--steps", "1"), "--to", one))
        folders = [one, shutil.copytree(one, self.root / "another")]
        outs = self.ends_of(self.ranks(["train", "--data", self.text, *WORK, "--steps", "1", "--out", self.root / "two"],
                                       each=lambda rank: ["--model", folders[rank]]))
        self.assertEqual([code for code, _ in outs], [0, 0], outs)

    def test_places_that_make_no_sense(self):
        words = self.command("--steps", "1")
        port = free_port()
        self.refused_on_all(2, "WORLD_SIZE is set without RANK", words=words,
                            environments=[rank_environment(rank, 2, port, RANK=None) for rank in range(2)])
        self.refused_on_all(2, "TANDEM_TOKEN is not set", words=words,
                            environments=[rank_environment(rank, 2, port, TANDEM_TOKEN=None) for rank in range(2)])
        self.refused_on_all(2, "rank 1", words=[*words, "--grad-accum", "3"], count=3,
                            environments=[rank_environment(rank, 3, port) for rank in (0, 1, 1)])

    def test_an_address_that_cannot_be_had(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            place = rank_environment(0, 2, taken.getsockname()[1])
            (code, line), = self.ends_of(self.ranks(self.command("--steps", "1"), count=1, environments=[place]))
        self.assertEqual(code, 5, line)
        self.assertIn("MASTER_PORT", line)

    def test_parts_and_devices_that_do_not_fit(self):
        self.refused_on_all(2, "use a multiple of 2", words=self.command("--steps", "1", "--grad-accum", "3"))
        self.refused_on_all(2, "this is one of 2 processes", words=[*self.command("--steps", "1"), "--device", "host,host"])

    def test_a_folder_that_holds_a_run(self):
        out = self.train_in(1, "--steps", "1")
        first, second = self.ends_of(self.ranks(self.command("--steps", "1", "--out", out)))
        self.assertEqual((first[0], second[0]), (2, 5))
        self.assertIn("it already holds a run", first[1])
        self.assertIn("it already holds a run", second[1])

    def test_a_folder_that_not_all_ranks_see(self):
        words = self.command("--steps", "1")
        places = [self.root / f"place{rank}" / "out" for rank in range(2)]
        self.refused_on_all(2, "--out: it is not the same folder on all ranks", f"rank 0 writes in '{places[0]}'",
                            f"is not seen by rank 1 in '{places[1]}'", words=words, each=lambda rank: ["--out", places[rank]])
        for place in places:
            self.assertFalse(place.parent.exists(), "a refused run left files")

    def test_commands_that_work_in_one_process(self):
        for command in ("eval", "sample", "bench", "calibrate", "export", "score", "launch"):
            words = {"eval": ["--model", "x", "--data", "x"], "sample": ["--model", "x", "--prompt", "x"], "bench": ["--model", "x"],
                     "export": ["x", "--to", "y"], "score": ["x", "--data", "y"], "launch": ["--processes", "1", "--", "train"]}
            place = rank_environment(0, 2, free_port())
            (code, line), = self.ends_of(self.ranks([command, *words.get(command, [])], count=1, environments=[place]))
            self.assertEqual(code, 2, line)
            self.assertIn("only train works across processes", line)

    def test_a_plan_is_printed_once(self):
        shown = self.succeed(self.run_in(2, *self.command("--steps", "1", "--dry-run"))).stdout
        self.assertEqual(shown.count("ceiling"), 2)  # in the first line and the last
        self.assertNotIn("[1]", shown)

    def test_launches_of_nothing(self):
        for words, named in [(["--", "train"], "--processes"), (["--processes", "2"], "there is no command"),
                             (["--processes", "2", "--", "eval"], "only train"),
                             (["--processes", "2", "eval", "--model", "x"], "'eval': only train"),
                             (["train", "--processes", "2"], "--processes: missing; for example")]:
            self.refused(self.run_program("launch", *words), 2, named)

    def test_a_launch_whose_command_is_not_marked(self):
        level = ["--log-level", "warning"]
        for before, behind in (([], []), (level, []), ([], level)):
            out = self.new_out()
            words = self.command("--steps", "1", "--out", out)
            self.succeed(self.run_program(*before, "launch", *behind, "--processes", "2", *words))
            self.assertEqual(self.summary(out)["processes"], 2)


if __name__ == "__main__":
    main()
