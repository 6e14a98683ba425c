"""Output files of tools/prepare_data.py: what it refuses to overwrite, what it does not read, and what it leaves behind.

The tokenizer is a stand-in that makes a token of each byte, so that any Python can run these tests."""
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ProgramTest, main, wait_for  # noqa: E402
from stand_in import QUICK, SLOW, TOOL, StandInTest  # noqa: E402


def snapshot(folder):
    """Everything in a folder: files by content, links by target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(folder))] = kind
    return found


class PrepareOutput(StandInTest):
    def refused(self, result, code, *words):
        self.assertEqual(result.returncode, code, result.stderr)
        (line,) = result.stderr.splitlines()
        self.assertTrue(line.startswith("prepare_data.py: error: "), line)
        for word in words:
            self.assertIn(word, line)

    def refused_untouched(self, arguments, *words):
        before = snapshot(self.root)
        self.refused(self.prepare(*arguments), 2, *words)
        self.assertEqual(snapshot(self.root), before)

    def fresh(self):
        """An empty folder d."""
        subprocess.run(["rm", "-rf", str(self.d)], check=True)
        self.d.mkdir()

    def consistent(self):
        """Asserts that what is there of the outputs belongs together, and returns whether there are tokens."""
        mask = self.d / "out.mask.bin"
        if not self.out.exists():
            return False
        description = json.loads((self.d / "out.json").read_text())
        self.assertEqual(self.out.stat().st_size, 2 * description["tokens"])
        masked = description["targets"] != description["tokens"]
        self.assertEqual(mask.stat().st_size if mask.exists() else None, description["tokens"] if masked else None)
        return True

    # -- inputs that are outputs ------------------------------------------------------------------------------

    def test_an_input_that_is_an_output_is_refused(self):
        for name in ("out.json", "out.bin", "out.mask.bin"):
            for way in ("itself", "path", "link", "folder link", "hard link", "output link"):
                with self.subTest(name=name, way=way):
                    self.fresh()
                    target, given = self.d / name, self.d / name
                    self.file(target if way != "output link" else self.d / "mine.jsonl", QUICK)
                    if way == "path":
                        given = self.d / ".." / "d" / name
                    elif way == "link":
                        given = self.d / "link.jsonl"
                        given.symlink_to(name)
                    elif way == "folder link":
                        (self.d / "again").symlink_to(".")
                        given = self.d / "again" / name
                    elif way == "hard link":
                        given = self.d / "hard.jsonl"
                        os.link(target, given)
                    elif way == "output link":
                        given = self.d / "mine.jsonl"
                        target.symlink_to("mine.jsonl")
                    self.refused_untouched(["--out", self.out, self.text, given], "is an input", name,
                                           "name another --out")

    def test_a_folder_of_parts_is_no_input(self):
        """Documents of the user's in a folder that has the name of the work folder."""
        self.file("d/out.parts/essay.txt", "mine")
        self.refused_untouched(["--out", self.out, self.d / "out.parts"], "is an input", "out.parts")

    def test_outputs_named_as_inputs_are_refused(self):
        self.succeed(self.prepare("--out", self.out, self.file("q.jsonl", QUICK)))
        for name in ("out.bin", "out.json", "out.mask.bin"):
            self.refused_untouched(["--out", self.d / "other.bin", self.d / name], name, "an output of this tool")
            link = self.root / f"link-{name}"
            link.symlink_to(self.d / name)
            self.refused_untouched(["--out", self.d / "other.bin", link], link.name, "an output of this tool")
        process = self.begin("--out", self.d / "killed.bin", self.file("slow.jsonl", "".join(SLOW)))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (folder,) = self.d.glob("killed.parts/*/")
        for given in (folder.parent, folder, next(folder.glob("*.json"))):
            self.refused_untouched(["--out", self.d / "other.bin", given], "an output of this tool")

    # -- files of others --------------------------------------------------------------------------------------

    def test_files_of_others_are_not_overwritten(self):
        whole = {"dtype": "uint16", "vocab_size": 257, "end_token": 256, "layout": "stream", "tokens": 2, "targets": 2,
                 "records": 1, "tokenizer": "tokenizer.json"}
        own = json.dumps({**whole, "written_by": "tandem prepare_data"})
        cases = {
            "dataset": {"out.json": QUICK},
            "empty description": {"out.json": ""},
            "list": {"out.json": "[]"},
            "deep": {"out.json": "[" * 10000},
            "description by hand": {"out.json": '{"dtype": "uint16"}', "out.bin": "ab"},
            "description with a field more": {"out.json": json.dumps({**whole, "mine": 1})},
            "description with a field less": {"out.json": json.dumps({k: v for k, v in whole.items() if k != "records"})},
            "description that counts in words": {"out.json": json.dumps({**whole, "tokens": "two"})},
            "tokens": {"out.bin": "ab"},
            "empty tokens": {"out.bin": ""},
            "tokens of another size": {"out.json": own, "out.bin": "abc"},
            "tokens beside a dataset": {"out.json": QUICK, "out.bin": "abcd"},
            "mask": {"out.mask.bin": "\1\1"},
            "mask that is not described": {"out.json": own, "out.bin": "abcd", "out.mask.bin": "\1\1"},
            "parts": {"out.parts/essay.txt": "mine"},
            "parts of a like name": {"out.parts/0123456789abcdef/essay.txt": "mine"},
            "parts, a file": {"out.parts": "mine"},
        }
        for name, files in cases.items():
            with self.subTest(name):
                self.fresh()
                for file, content in files.items():
                    self.file(self.d / file, content)
                self.refused_untouched(["--out", self.out, self.text], "not written by this tool", "d/out.",
                                       "name another --out")

    def test_folders_and_links_are_not_overwritten(self):
        for name in ("out.json", "out.bin", "out.mask.bin", "out.parts"):
            with self.subTest(name):
                self.fresh()
                if name != "out.parts":
                    (self.d / name).mkdir()
                    self.refused_untouched(["--out", self.out, self.text], f"d/{name} is a folder")
                    (self.d / name).rmdir()
                for target in ("elsewhere", "nowhere"):
                    self.file("d/elsewhere", "mine")
                    (self.d / name).symlink_to(target)
                    self.refused_untouched(["--out", self.out, self.text], f"d/{name} is a link")
                    (self.d / name).unlink()

    def test_the_tokenizer_is_not_overwritten(self):
        self.refused_untouched(["--out", self.root / "model" / "tokenizer.bin", self.text],
                               "model/tokenizer.json is not written by this tool")

    def test_a_file_that_comes_while_the_tool_works_is_not_overwritten(self):
        process = self.begin("--out", self.out, self.file("slow.jsonl", "".join(SLOW[:60])))
        dataset = self.file("d/out.json", QUICK)
        _, stderr = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 2, stderr)
        self.assertIn("d/out.json is not written by this tool", stderr.splitlines()[-1])
        self.assertEqual(dataset.read_text(), QUICK)
        self.assertEqual(os.listdir(self.d), ["out.json"])

    # -- the tool's own files ---------------------------------------------------------------------------------

    def test_its_own_files_are_replaced(self):
        text, masked = self.file("in/a.txt", "abc"), self.file("in/q.jsonl", QUICK)
        for given in (text, masked, masked, text):
            self.succeed(self.prepare("--out", self.out, given))
            self.assertTrue(self.consistent())
            self.assertEqual((self.d / "out.mask.bin").exists(), given == masked)
        self.assertEqual(self.out.stat().st_size, 2 * 4)

    def test_files_of_older_versions_are_its_own(self):
        given = self.file("d/q.jsonl", QUICK)
        for layout in ("stream", "rows"):
            self.succeed(self.prepare("--out", self.out, "--layout", layout, given))
            written = snapshot(self.d)
            description = json.loads(written["out.json"])
            self.assertEqual(description.pop("written_by"), "tandem prepare_data")
            self.file("d/out.json", json.dumps(description, indent=2) + "\n")
            self.file("d/out.parts/0123456789abcdef/000000.ids", "abcd")
            result = self.succeed(self.prepare("--out", self.root / "other.bin", self.d))
            self.assertIn("d/out.parts", result.stderr)
            self.assertEqual((self.root / "other.bin").read_bytes(), b"".join(bytes([c, 0]) for c in b"abc") + b"\0\1")
            self.succeed(self.prepare("--out", self.out, "--layout", layout, given))
            self.assertEqual(snapshot(self.d), written)

    def test_a_folder_that_holds_the_output(self):
        self.file("d/a.txt", "abc")
        self.file("d/b.json", QUICK)
        self.file("d/c.bin", "no output")
        self.assertEqual(self.succeed(self.prepare("--out", self.out, self.d)).stderr.count("left out"), 0)
        first = snapshot(self.d)
        os.link(self.out, self.d / "linked.txt")
        for other in (self.out, self.out, self.d / "sub" / "other.bin"):
            result = self.succeed(self.prepare("--out", other, self.d))
            (line,) = [line for line in result.stderr.splitlines() if "left out" in line]
            for name in ("out.bin", "out.json", "out.mask.bin"):
                self.assertIn(f"d/{name}", line)
            self.assertEqual(other.read_bytes(), first["out.bin"])
            (self.d / "linked.txt").unlink(missing_ok=True)
        self.assertEqual({k: v for k, v in snapshot(self.d).items() if not k.startswith("sub")}, first)
        self.assertEqual((self.d / "sub" / "other.mask.bin").read_bytes(), first["out.mask.bin"])

    def test_a_folder_of_outputs_alone(self):
        self.succeed(self.prepare("--out", self.out, self.text))
        self.refused_untouched(["--out", self.root / "other.bin", self.d], "holds no files but outputs of this tool")

    # -- what is left behind ----------------------------------------------------------------------------------

    def test_a_failed_run_leaves_nothing(self):
        before = snapshot(self.d)
        for given in (self.file("bad.jsonl", QUICK + "[\n"), self.file("half.jsonl", '{"text": "\\ud800"}'),
                      self.file("none.jsonl", "")):
            result = self.prepare("--out", self.out, "--no-end-token", given)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertEqual(snapshot(self.d), before)
            # Folders that it made are gone, too.
            self.assertEqual(self.prepare("--out", self.d / "new" / "er" / "out.bin", given).returncode, 2)
            self.assertEqual(snapshot(self.d), before)

    def test_a_signal_leaves_nothing(self):
        slow = self.file("slow.jsonl", "".join(SLOW))
        for number in (signal.SIGINT, signal.SIGTERM):
            for whole_group in (True, False, True, True):
                with self.subTest(signal=number, whole_group=whole_group):
                    process = self.begin("--out", self.d / "new" / "out.bin", slow)
                    (os.killpg if whole_group else os.kill)(process.pid, number)
                    _, stderr = process.communicate(timeout=60)
                    self.assertEqual(process.returncode, 128 + number, stderr)
                    self.assertNotIn("Traceback", stderr)
                    self.assertIn(f"prepare_data.py: error: ended by {number.name}", stderr.splitlines()[-1])
                    self.assertEqual(os.listdir(self.d), [])

    def test_a_fault_of_the_tool_is_one_line(self):
        for records in ('{"text": "broken"}\n', QUICK + '{"text": "broken"}\n'):  # in the main process, in a worker
            result = self.prepare("--out", self.out, self.file("broken.jsonl", records))
            self.refused(result, 1, "a fault of this tool: AttributeError", "report it")
            self.assertEqual(os.listdir(self.d), [])

    def workers_of(self, process):
        """Ids of the workers that are not yet dead."""
        return [int(p) for p in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]

    def test_workers_leave_signals_to_the_main_process(self):
        process = self.begin("--out", self.out, self.file("slow.jsonl", "".join(SLOW[:100])))
        for worker in self.workers_of(process):
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, stderr)

    def test_workers_end_with_the_main_process(self):
        process = self.begin("--out", self.out, self.file("slow.jsonl", "".join(SLOW)))
        workers = self.workers_of(process)
        self.assertEqual(len(workers), 2)
        process.kill()
        process.wait()

        def has_ended(worker):
            try:
                return pathlib.Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except (FileNotFoundError, ProcessLookupError):
                return True

        wait_for(lambda: all(map(has_ended, workers)), 20)

    def test_a_killed_worker_ends_the_run(self):
        process = self.begin("--out", self.out, self.file("slow.jsonl", "".join(SLOW)))
        os.kill(self.workers_of(process)[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 2, stderr)
        self.assertIn("a worker process was killed", stderr.splitlines()[-1])
        self.assertNotIn("Traceback", stderr)
        self.assertEqual(os.listdir(self.d), [])

    def test_what_a_killed_run_left_is_removed(self):
        for given, going_on in ((QUICK, False), (None, True)):
            with self.subTest(going_on=going_on):
                slow = self.file("slow.jsonl", "".join(SLOW))
                process = self.begin("--out", self.out, slow)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kept = self.file("d/out.parts/mine.txt", "mine")
                if not going_on:
                    slow = self.file("quick.jsonl", given)
                result = self.succeed(self.prepare("--out", self.out, "--part-bytes", "200", slow))
                self.assertEqual("going on" in result.stderr, going_on)
                self.assertTrue(self.consistent())
                self.assertEqual(os.listdir(self.d / "out.parts"), ["mine.txt"])
                kept.unlink()
                kept.parent.rmdir()

    def test_a_run_that_is_killed_goes_on_in_the_folder_that_it_reads(self):
        self.file("d/slow.jsonl", "".join(SLOW))
        process = self.begin("--out", self.out, self.d)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        result = self.succeed(self.prepare("--out", self.out, "--part-bytes", "200", self.d))
        self.assertIn("going on", result.stderr)
        self.assertIn("left out", result.stderr)
        self.assertIn("d/out.parts", result.stderr)
        self.assertEqual(json.loads((self.d / "out.json").read_text())["records"], 200)

    def test_a_kill_between_renames(self):
        """No description may stand beside the tokens or the mask of another run, and the same command puts all right."""
        plain, masked = self.file("plain.jsonl", '{"text": "old text"}\n'), self.file("masked.jsonl", QUICK)
        for old, new in ((plain, masked), (masked, plain), (masked, masked)):
            deaths = 0
            for at in range(1, 9):
                self.fresh()
                self.succeed(self.prepare("--out", self.out, old))
                result = self.prepare("--out", self.out, new, DIE_BEFORE=str(at))
                self.consistent()
                if result.returncode == 0:
                    break
                self.assertEqual(result.returncode, -signal.SIGKILL, result.stderr)
                deaths += 1
                self.succeed(self.prepare("--out", self.out, new))
                self.assertTrue(self.consistent())
                self.assertEqual(len(os.listdir(self.d)), 3 if new == masked else 2)
            self.assertGreaterEqual(deaths, 3)

    def test_a_kill_between_renames_of_a_validation_set(self):
        """No NAME.bin stands beside a description of another run, nor one set beside the other set of another run."""
        old, new = (self.file(f"{text}.jsonl", "".join(f'{{"text": "{i}{text}"}}\n' for i in range(10))) for text in ("a", "bc"))
        sets = (self.out, self.d / "out-validation.bin")
        deaths = 0
        for at in range(1, 12):
            self.fresh()
            self.succeed(self.prepare("--out", self.out, "--validation", "0.2", old))
            result = self.prepare("--out", self.out, "--validation", "0.2", new, DIE_BEFORE=str(at))
            of_a_record = set()
            for path in filter(pathlib.Path.exists, sets):
                description = json.loads(path.with_suffix(".json").read_text())
                self.assertEqual(path.stat().st_size, 2 * description["tokens"])
                of_a_record.add(description["tokens"] / description["records"])
            self.assertLessEqual(len(of_a_record), 1)
            if result.returncode == 0:
                break
            self.assertEqual(result.returncode, -signal.SIGKILL, result.stderr)
            deaths += 1
            self.succeed(self.prepare("--out", self.out, "--validation", "0.2", new))
            self.assertEqual(len(os.listdir(self.d)), 4)
        self.assertGreaterEqual(deaths, 6)

    # -- several runs, and folders that cannot be written -----------------------------------------------------

    def test_two_runs_of_one_name(self):
        process = self.begin("--out", self.out, self.file("slow.jsonl", "".join(SLOW)))
        before = set(self.d.rglob("*.ids"))
        self.refused(self.prepare("--out", self.out, self.text), 7, "another run", "d/out.bin")
        self.assertLessEqual(before, set(self.d.rglob("*.ids")))
        _, stderr = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, stderr)
        self.assertTrue(self.consistent())

    def test_two_runs_of_one_folder(self):
        slow = self.file("d/slow.jsonl", "".join(SLOW[:100]))
        process = self.begin("--out", self.out, slow)
        result = self.succeed(self.prepare("--out", self.d / "other.bin", self.d))
        self.assertIn("d/out.parts", result.stderr)
        _, stderr = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, stderr)
        self.assertEqual(self.out.read_bytes(), (self.d / "other.bin").read_bytes())
        self.assertEqual(len(os.listdir(self.d)), 5)

    def test_what_cannot_be_written(self):
        before = snapshot(self.root)
        self.refused(self.prepare("--out", self.text / "out.bin", self.text), 7, "cannot write", "text.txt")
        self.assertEqual(snapshot(self.root), before)
        if os.getuid() != 0:  # whom permissions do not hold up
            self.d.chmod(0o555)
            self.refused(self.prepare("--out", self.out, self.text), 7, "cannot write", "Permission denied")
            self.d.chmod(0o755)

    def test_a_full_disk_leaves_nothing(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        for layout in ("stream", "rows"):  # full at the first part; full when parts are joined
            given = self.text if layout == "stream" else self.file("q.jsonl", '{"text": "abc"}\n' * 60)
            flags = [] if layout == "stream" else ["--layout", "rows", "--row-length", "100"]
            result = self.prepare("--out", self.out, *flags, given, preexec_fn=limit)
            self.assertEqual(result.returncode, 7, result.stderr)
            self.assertIn("cannot write", result.stderr.splitlines()[-1])
            self.assertNotIn("Traceback", result.stderr)
            self.assertEqual(os.listdir(self.d), [])


class SplitText(ProgramTest):
    """tools/prepare_text.py replaces its own folder alone."""

    def split(self, folder, out):
        return subprocess.run([sys.executable, str(TOOL.with_name("prepare_text.py")), str(folder), "--out", str(out)],
                              capture_output=True, text=True, timeout=60)

    def test_what_it_did_not_write_stays(self):
        texts = self.root / "texts"
        for n in range(6):
            self.file(f"texts/{n}.txt", " ".join(f"word{n}x{i}" for i in range(200)))
        out = self.root / "out"
        for _ in range(2):
            self.succeed(self.split(texts, out))
        whole = snapshot(out)
        self.file("mine/notes", "mine")
        self.file("beside/train/a.txt", "mine")  # a folder of the same name, but nothing says that this tool wrote it
        (self.root / "link").symlink_to(out)
        for other in [texts, self.root, self.root / "mine", self.root / "beside", self.root / "link", texts / "0.txt"]:
            before = snapshot(self.root)
            result = self.split(texts, other)
            self.assertEqual(result.returncode, 2, other)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
            self.assertEqual(snapshot(self.root), before, other)
        self.assertEqual(snapshot(out), whole)


if __name__ == "__main__":
    main()
