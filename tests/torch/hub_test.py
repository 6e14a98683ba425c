"""Models and data sets by name: what is there is found, also without a network and after a download that was cut off; each mistake and
each failure of the hub is one line that says what to do. Against a server on loopback that answers as the hub does."""
import contextlib
import datetime
import errno
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

PACKAGE = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None  # the folder that holds tandem/
if PACKAGE:
    sys.path.insert(0, str(PACKAGE))

import hub_server  # noqa: E402

HUB = hub_server.Hub()
HOME = pathlib.Path(tempfile.mkdtemp(prefix="tandem-hub-"))
unittest.addModuleCleanup(shutil.rmtree, HOME, True)
for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_"))]:
    del os.environ[name]
os.environ.update(HF_ENDPOINT=HUB.address, HF_HOME=str(HOME), HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1", no_proxy="127.0.0.1")

try:
    import huggingface_hub
except ImportError:
    print("skipped: no huggingface_hub")
    sys.exit(77)

from tandem.finetuning.data_source import find_data  # noqa: E402
from tandem.finetuning.model_source import find_model  # noqa: E402
from tandem.finetuning.refusal import Refusal  # noqa: E402

MODEL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "tokenizer_config.json": b"{}",
         "model.safetensors": bytes(range(256)) * 4096, "README.md": b"# A model", "pytorch_model.bin": b"old", "consolidated.safetensors": b"too",
         "additional_chat_templates/tool_use.jinja": b"{{ messages }}"}
SHARDED = {**{name: MODEL[name] for name in ("config.json", "tokenizer.json")}, "a.safetensors": b"a" * 300000, "b.safetensors": b"b" * 400000,
           "model.safetensors.index.json": json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode()}
ROWS = [{"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}, \u00fc."}]} for i in range(7)]


def without(files, *names):
    return {name: content for name, content in files.items() if name not in names}


class HubTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        HUB.repositories.clear()
        HUB.asked.clear()
        HUB.cuts, HUB.stand_at = 0, None
        HUB.standing.clear()
        shutil.rmtree(HOME / "hub", ignore_errors=True)
        self.said = []

    def put(self, files, name="org/small-model", kind="models", **how):
        HUB.repositories[kind, name] = hub_server.Repository(files, **how)

    def find(self, name="org/small-model", revision=None, offline=False):
        return find_model(str(name), revision=revision, offline=offline, progress=self.said.append)

    def refuses(self, code, *texts, **how):
        with self.assertRaises(Refusal) as caught:
            self.find(**how)
        self.check(caught.exception, code, texts)

    def check(self, refusal, code, texts):
        line = str(refusal)
        self.assertEqual(refusal.code, code, line)
        self.assertNotIn("\n", line)
        self.assertRegex(line, r"^\w+ [^;]+: [^;]+; .+")
        for text in texts:
            self.assertIn(text, line)

    @contextlib.contextmanager
    def without_network(self):
        """Nobody listens at the address of the hub."""
        from huggingface_hub import constants, hf_api
        nowhere = "http://127.0.0.1:9"
        places = [(constants, "ENDPOINT", nowhere), (hf_api.api, "endpoint", nowhere),
                  (constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(HUB.address, nowhere))]
        if "datasets" in sys.modules:
            places.append((sys.modules["datasets"].config, "HF_ENDPOINT", nowhere))
        with contextlib.ExitStack() as stack:
            for where, attribute, value in places:
                stack.enter_context(unittest.mock.patch.object(where, attribute, value))
            yield


class Models(HubTest):
    def test_what_is_needed_is_downloaded_and_told(self):
        self.put(MODEL)
        folder = self.find()
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        self.assertEqual(there, set(MODEL) - {"README.md", "pytorch_model.bin", "consolidated.safetensors"})
        self.assertEqual((folder / "model.safetensors").read_bytes(), MODEL["model.safetensors"])
        self.assertIn("MODEL org/small-model: 1 files of weights, 1.0 MB, from the hub or its local cache", self.said)

    def test_progress_is_told_in_bytes(self):
        self.put(MODEL)
        with unittest.mock.patch("tandem.finetuning.hub._SECONDS_BETWEEN_LINES", 0), \
                unittest.mock.patch("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100000):
            self.find()
        told = [line for line in self.said if " MB of 1.0 MB" in line]
        self.assertTrue(any(line.endswith(": 1.0 MB of 1.0 MB") for line in told), self.said)
        self.assertGreater(len(told), 1)

    def test_a_second_call_downloads_nothing_and_needs_no_network(self):
        self.put(MODEL)
        folder = self.find()
        HUB.asked.clear()
        self.assertEqual(self.find(), folder)
        self.assertEqual(HUB.files_asked(), [])
        self.assertEqual(self.find(offline=True), folder)
        with self.without_network():
            self.assertEqual(self.find(), folder)
        self.assertIn("taken from the local cache", self.said[-1])

    def test_a_branch_and_a_commit(self):
        self.put(MODEL, branches=("main", "v2"))
        self.assertEqual(self.find(revision="v2"), self.find(revision=hub_server.commit_of(MODEL)))
        self.assertEqual(self.find(revision="v2", offline=True), self.find())

    def test_a_branch_that_was_renamed(self):
        self.put(MODEL, branches=("trunk", "v2"))
        self.refuses(2, "no branch, tag or commit 'main'", "it has trunk, v2", "--revision")
        self.refuses(2, "'v1'", revision="v1")

    def test_a_connection_that_is_cut_off_goes_on_within_the_file(self):
        self.put(MODEL)
        HUB.cut_at, HUB.cuts = 600000, 1
        with unittest.mock.patch("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100000):
            folder = self.find()
        self.assertEqual((folder / "model.safetensors").read_bytes(), MODEL["model.safetensors"])
        self.assertIn("bytes=600000-", " ".join(str(part) for _, path, part in HUB.asked if path.endswith("model.safetensors")))

    def test_a_killed_download_goes_on_at_the_next_call(self):
        self.put(SHARDED)
        HUB.stand_at = 350000  # the second file is cut off, the first is not
        code = ("import sys; sys.path.insert(0, sys.argv[1]); from tandem.finetuning.model_source import find_model; "
                "find_model('org/small-model', revision=None, offline=False, progress=print)")
        child = subprocess.Popen([sys.executable, "-c", code, str(PACKAGE)], stdout=subprocess.DEVNULL)
        self.assertTrue(HUB.standing.wait(60))
        while not any((HOME / "hub").rglob("a.safetensors")):
            self.assertIsNone(child.poll())
        child.kill()
        child.wait()
        HUB.stand_at = None
        self.refuses(2, "b.safetensors of its weights are missing in the local cache", "hf download org/small-model", offline=True)
        HUB.asked.clear()
        folder = self.find()
        self.assertEqual(HUB.files_asked(), ["b.safetensors"])
        self.assertEqual((folder / "b.safetensors").read_bytes(), SHARDED["b.safetensors"])

    def test_a_hub_that_does_not_answer(self):
        with self.without_network():
            self.refuses(5, "not in the local cache", "does not answer", "hf download org/small-model")
        self.refuses(2, "not in the local cache", "offline", "hf download org/small-model", offline=True)

    def test_gates(self):
        for status in (401, 403):
            self.put(MODEL, gate=status)
            self.refuses(2, f"gated, and the hub gives no access ({status})", f"{HUB.address}/org/small-model", "hf auth login")

    def test_misspelt_names(self):
        self.put(MODEL)
        self.find()
        self.refuses(2, "the hub has none of this name, or it is private (401)", "did you mean org/small-model?", name="org/smal-model")
        self.refuses(2, "no such folder", "did you mean org/small-model?", name="small-modell")
        shutil.copytree(self.find(), self.folder / "mine", symlinks=False)
        self.refuses(2, f"did you mean {self.folder / 'mine'}?", name=self.folder / "mein")

    def test_full_disks(self):
        self.put(MODEL)
        with unittest.mock.patch("shutil.disk_usage", return_value=shutil._ntuple_diskusage(10**9, 10**9, 10**5)):
            self.refuses(7, "1.0 MB of weights are to be downloaded", "0.1 MB free", "HF_HOME")
        self.assertNotIn("model.safetensors", HUB.files_asked())
        with unittest.mock.patch("huggingface_hub.file_download.http_get", side_effect=OSError(errno.ENOSPC, "No space left", "/cache/x")):
            self.refuses(7, "cannot write /cache/x: the disk is full", "HF_HOME")
        self.find()

    def test_quantized_weights_that_stay_as_they_are(self):
        """Quantized weights are downloaded as the base of adapters, and found without a network."""
        config = b'{"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}}'
        self.put({**MODEL, "config.json": config})
        self.refuses(4, "quantized (bitsandbytes)", "--lora-rank 16")
        folder = find_model("org/small-model", revision=None, offline=False, progress=self.said.append, frozen=True)
        self.assertEqual((folder / "config.json").read_bytes(), config)
        for name, offline in (("org/small-model", True), (folder, False)):
            self.assertEqual(find_model(str(name), revision=None, offline=offline, progress=self.said.append, frozen=True), folder)

    def test_models_that_cannot_be_trained(self):
        adapter = {"adapter_config.json": b'{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": b"0", "tokenizer.json": b"{}"}
        quantized = {**MODEL, "config.json": b'{"quantization_config": {"quant_method": "gptq"}}'}
        for files, code, texts in ((adapter, 2, ("holds an adapter", "of org/base", "by --adapter")),
                                   (quantized, 4, ("quantized (gptq)", "made of")),
                                   (without(MODEL, "model.safetensors"), 4, ("pytorch_model.bin: PyTorch", "save_pretrained")),
                                   (without(MODEL, "model.safetensors", "pytorch_model.bin"), 4, ("has no model.safetensors",)),
                                   (without(MODEL, "tokenizer.json"), 2, ("no tokenizer.json",)),
                                   (without(MODEL, "config.json"), 2, ("no config.json",)),
                                   (without(SHARDED, "b.safetensors"), 4, ("b.safetensors",))):
            with self.subTest(texts[0]):
                shutil.rmtree(HOME / "hub", ignore_errors=True)
                HUB.asked.clear()
                self.put(files)
                self.refuses(code, "MODEL org/small-model: ", *texts)
                self.assertFalse([name for name in HUB.files_asked() if name.endswith((".safetensors", ".bin"))])
                here = self.folder / texts[0].split()[-1].replace("/", "")
                for name, content in files.items():
                    (here / name).parent.mkdir(parents=True, exist_ok=True)
                    (here / name).write_bytes(content)
                self.refuses(code, *texts, name=here)

    def test_folders(self):
        for name, content in MODEL.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
        self.assertEqual(self.find(name=self.folder), self.folder)
        self.refuses(2, "it is a file", name=self.folder / "config.json")
        self.refuses(2, "has no revision v2", name=self.folder, revision="v2")
        (self.folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        self.refuses(4, "pointer of Git LFS", "git lfs pull", name=self.folder)
        (self.folder / "config.json").write_text("{")
        self.refuses(2, "cannot be read", name=self.folder)
        outer = self.folder.parent / (self.folder.name + "-run")
        self.folder.rename(outer)
        self.folder.mkdir()
        shutil.move(outer, self.folder / "model")
        self.refuses(2, f"name {self.folder / 'model'}", name=self.folder)


@unittest.skipUnless(importlib.util.find_spec("datasets"), "no datasets")
class DataSets(HubTest):
    def setUp(self):
        super().setUp()
        shutil.rmtree(HOME / "datasets", ignore_errors=True)
        import datasets
        from huggingface_hub import constants
        self.offline = [unittest.mock.patch.object(where, "HF_HUB_OFFLINE", False) for where in (datasets.config, constants)]
        for patch in self.offline:
            patch.start()
            self.addCleanup(patch.stop)

    def put_lines(self, rows=ROWS, **how):
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.put({"train.jsonl": lines, "README.md": b"---\nlicense: mit\n---\n"}, **{"name": "org/chats", "kind": "datasets", **how})

    def data(self, *names, split="train", offline=False):
        return find_data(names, split=split, folder=self.folder / "data", offline=offline, progress=self.said.append)

    def refuses_data(self, code, *texts, name="org/chats", **how):
        with self.assertRaises(Refusal) as caught:
            self.data(name, **how)
        self.check(caught.exception, code, texts)
        self.assertEqual(list((self.folder / "data").glob("*")), [])

    def rows_of(self, file):
        return [json.loads(line) for line in file.read_text().splitlines()]

    def test_files_and_folders_stand_for_themselves(self):
        (self.folder / "a.jsonl").write_text("{}")
        self.assertEqual(self.data(str(self.folder), str(self.folder / "a.jsonl")), [self.folder, self.folder / "a.jsonl"])
        self.refuses_data(2, "no such file", f"did you mean {self.folder / 'a.jsonl'}?", name=str(self.folder / "b.jsonl"))

    def test_a_data_set_is_written_as_lines(self):
        self.put_lines()
        file, = self.data("org/chats")
        self.assertEqual(file, self.folder / "data" / "org--chats--train.jsonl")
        self.assertEqual(self.rows_of(file), ROWS)
        self.assertIn("7 records of its part train", self.said[-1])

    def test_a_part_of_a_split(self):
        self.put_lines()
        file, = self.data("org/chats", split="train[:3]")
        self.assertEqual(self.rows_of(file), ROWS[:3])
        self.assertNotEqual(self.data("org/chats"), [file])

    def test_null_fields_of_other_rows_are_left_out(self):
        rows = [{"messages": [{"role": "user", "content": "a", "name": "b"}]}, {"messages": [{"role": "user", "content": "c"}]}]
        self.put_lines(rows)
        self.assertEqual(self.rows_of(self.data("org/chats")[0]), rows)
        import pyarrow
        self.put_table(pyarrow.Table.from_pylist(rows), name="org/table")
        self.assertEqual(self.rows_of(self.data("org/table")[0]), rows)

    def test_a_second_call_takes_the_file(self):
        self.put_lines()
        file, = self.data("org/chats")
        HUB.repositories.clear()
        self.assertEqual(self.data("org/chats"), [file])

    def test_from_the_local_cache(self):
        self.put_lines()
        file, = self.data("org/chats")
        for offline in (False, True):
            file.unlink()
            with self.without_network():
                self.assertEqual(self.rows_of(self.data("org/chats", offline=offline)[0]), ROWS)

    def test_configurations(self):
        card = b"---\nconfigs:\n- config_name: one\n  data_files: one.jsonl\n- config_name: two\n  data_files: two.jsonl\n---\n"
        files = {"README.md": card, **{f"{name}.jsonl": json.dumps({"text": name}).encode() for name in ("one", "two")}}
        self.put(files, name="org/chats", kind="datasets")
        self.assertEqual(self.rows_of(self.data("org/chats:two")[0]), [{"text": "two"}])
        shutil.rmtree(self.folder / "data")
        self.refuses_data(2, "several configurations", "org/chats:one, org/chats:two")
        self.refuses_data(2, "none called 'three'", "org/chats:one, org/chats:two", name="org/chats:three")

    def test_mistakes(self):
        self.put_lines()
        self.refuses_data(2, "no part 'test'", "--split: train", split="test")
        self.data("org/chats")
        shutil.rmtree(self.folder / "data")
        self.refuses_data(2, "or it is private", "did you mean org/chats?", name="org/chat")
        self.put({"README.md": b"# No data"}, name="org/nothing", kind="datasets")
        self.refuses_data(4, "no files of it that can be read", name="org/nothing")
        for status in (401, 403):
            self.put_lines(name=f"org/gated{status}", gate=status)
            self.refuses_data(2, "gated", "hf auth login", name=f"org/gated{status}")
        self.put({"program.py": b"import datasets", "README.md": b""}, name="org/program", kind="datasets")
        self.refuses_data(4, "program of its own", name="org/program")
        self.refuses_data(2, "not in the local cache", "offline", name="org/other", offline=True)

    def test_dates_are_text_and_pictures_are_refused(self):
        import datasets
        import pyarrow
        when = datetime.datetime(2026, 1, 2, 3, 4, 5)
        table = pyarrow.table({"text": ["a"], "when": [when]})
        self.put_table(table)
        self.assertEqual(self.rows_of(self.data("org/chats")[0]), [{"text": "a", "when": "2026-01-02T03:04:05"}])
        shutil.rmtree(self.folder / "data")
        features = datasets.Features({"text": datasets.Value("string"), "pictures": datasets.List(datasets.Image())})
        rows = datasets.Dataset.from_dict({"text": ["a"], "pictures": [[{"bytes": b"0", "path": None}]]}, features)
        self.put_table(rows.data.table, name="org/pictures")
        self.refuses_data(4, "images in its column 'pictures'", name="org/pictures")
        self.put_table(pyarrow.table({"raw": [b"0"]}), name="org/raw")
        self.refuses_data(4, "a value of the type bytes", name="org/raw")

    def put_table(self, table, name="org/chats"):
        import pyarrow.parquet
        pyarrow.parquet.write_table(table, self.folder / "table")
        self.put({"train.parquet": (self.folder / "table").read_bytes()}, name=name, kind="datasets")

    def test_without_network(self):
        with self.without_network():
            self.refuses_data(5, "not in the local cache", "does not answer")

    def test_a_full_disk_leaves_nothing(self):
        self.put_lines()
        with unittest.mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            self.refuses_data(7, "cannot write", "No space left")
        self.assertEqual(list((self.folder / "data").iterdir()), [])
        (self.folder / "data" / ".org--chats--train.jsonl.1.part").write_text("left by a process that was killed")
        self.assertEqual(self.data("org/chats"), list((self.folder / "data").iterdir()))


if __name__ == "__main__":
    unittest.main()
