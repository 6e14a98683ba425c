"""Files that tools/prepare_data.py reads or refuses: names, compression, encodings, tables, folders, and lines in errors."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2", "pyarrow", "zstandard")

import gzip  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402

from common import TOOL, PrepareTest, byte_level, main  # noqa: E402

RECORDS = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i} \u00e9"} for i in range(40)]
LINES = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS)
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def zstd(content):
    import zstandard
    return zstandard.ZstdCompressor().compress(content)


class Inputs(PrepareTest):
    def setUp(self):
        super().setUp()
        self.tokenizer(byte_level("<|endoftext|>"), eos_token="<|endoftext|>")

    def read(self, *paths):
        self.succeed(self.prepare("--show", "0", *paths))
        return self.written()

    def test_names_compression_and_json_in_every_form(self):
        wanted = self.read(self.file("a.jsonl", LINES))
        self.assertEqual(wanted[2]["records"], 40)
        raw = LINES.encode()
        array, spread = json.dumps(RECORDS), json.dumps(RECORDS, indent=2, ensure_ascii=False)
        for name, content in [
                ("a.JSONL", raw), ("a.json", raw), ("a.NDJson", raw), ("bom.jsonl", b"\xef\xbb\xbf" + raw),
                ("crlf.jsonl", raw.replace(b"\n", b"\r\n")), ("blank.jsonl", b"\n \n" + raw.replace(b"\n", b"\n\n")),
                ("open.jsonl", raw[:-1]), ("array.json", array), ("array.jsonl", spread), ("spread.json", "\ufeff" + spread),
                ("objects.json", "".join(json.dumps(r, indent=1) + "\n" for r in RECORDS)),
                ("two.json", json.dumps(RECORDS[:7]) + "\n" + json.dumps(RECORDS[7:])),
                ("a.jsonl.gz", gzip.compress(raw)), ("A.JSON.GZ", gzip.compress(spread.encode())),
                ("members.ndjson.gz", gzip.compress(raw[:500]) + gzip.compress(raw[500:])), ("unnamed.jsonl", gzip.compress(raw)),
                ("a.jsonl.zst", zstd(raw)), ("a.json.zst", zstd(array.encode())), ("frames.jsonl.zst", zstd(raw[:99]) + zstd(raw[99:]))]:
            with self.subTest(name):
                self.assertEqual(self.read(self.file(name, content)), wanted)

    def test_texts_in_every_form(self):
        text = "caf\u00e9\r\nline \U0001f600\n"
        wanted = self.read(self.file("a.txt", text))
        for name, content in [("bom.txt", "\ufeff" + text), ("a.txt.gz", gzip.compress(text.encode())), ("a.ZST", zstd(text.encode())),
                              ("a.py", text), ("noname", text)]:
            with self.subTest(name):
                self.assertEqual(self.read(self.file(name, content)), wanted)
        self.assertEqual(self.text_and_targets()[0], text + "<|endoftext|>")
        for content in ("GGUF is a format.", "%PDF text", "PAR1 and BZh", "GIF8"):  # names of formats are text too
            self.read(self.file("b.txt", content))

    def test_tables(self):
        import pyarrow
        import pyarrow.feather
        import pyarrow.ipc
        import pyarrow.parquet
        wanted = self.read(self.file("a.jsonl", LINES))
        table = pyarrow.Table.from_pylist(RECORDS)
        paths = [self.root / name for name in ("one.parquet", "groups.PARQUET", "a.feather", "file.arrow", "stream.arrow", "lz4.feather")]
        pyarrow.parquet.write_table(table, paths[0])
        pyarrow.parquet.write_table(table, paths[1], row_group_size=7, compression="zstd")
        pyarrow.feather.write_feather(table, str(paths[2]), compression="uncompressed")
        for path, make in ((paths[3], pyarrow.ipc.new_file), (paths[4], pyarrow.ipc.new_stream)):
            with make(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=9)
        pyarrow.feather.write_feather(table, str(paths[5]), compression="lz4")
        for path in paths:
            with self.subTest(path.name):
                self.assertEqual(self.read(path), wanted)

        # In a column of structs, fields that another record has are null, and mean that they are not there.
        call = {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}]}
        chats = [{**CHAT, "tools": None, "id": None}, {"messages": [CHAT["messages"][0], call], "tools": [{"name": "get"}]}, {**CHAT, "id": "x"}]
        self.file("model/chat_template.jinja", 
                  "{{ tools | length if tools else 'none' }}{% for m in messages %}[{{ m.role }}]{% for key in m | sort %}{{ key }} "
                  "{% endfor %}{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.city }}{% endfor %}"
                  "{{ m.content }}!{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
        wanted = self.read(self.records(*chats))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), paths[0])
        self.assertEqual(self.read(paths[0]), wanted)

        # Arguments of calls have such fields too, each function its own.
        day = {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "ask", "arguments": {"day": "Monday"}}}]}
        self.file("model/chat_template.jinja",
                  "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
                  "{{ c.function.arguments | tojson }}{% endfor %}!{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
        chats = [{"messages": [CHAT["messages"][0], answer], "tools": [{"name": "get"}, {"name": "ask"}]} for answer in (call, day)]
        wanted = self.read(self.records(*chats))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), paths[0])
        self.assertEqual(self.read(paths[0]), wanted)

        # A column of maps gives objects.
        text = pyarrow.string()
        function = pyarrow.struct([("name", text), ("arguments", pyarrow.map_(text, text))])
        calls = pyarrow.list_(pyarrow.struct([("function", function)]))
        kind = pyarrow.list_(pyarrow.struct([("role", text), ("content", text), ("tool_calls", calls)]))
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get", "arguments": [("city", "Paris")]}}]}
        pyarrow.parquet.write_table(pyarrow.table({"messages": pyarrow.array([[CHAT["messages"][0], call]], type=kind)}), paths[0])
        self.read(paths[0])
        self.assertIn('get {"city": "Paris"}', self.text_and_targets()[1])

        self.out = self.root / "bad.bin"
        pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2]}), paths[0])
        self.refused(self.prepare(paths[0]), "one.parquet, record 1: a record needs", "'a'")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*RECORDS[:9], {"prompt": "x", "completion": None}]), paths[1],
                                    row_group_size=4)
        self.refused(self.prepare(paths[1]), "groups.PARQUET, record 10: a record needs")
        text = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")])
        pyarrow.parquet.write_table(pyarrow.table({"text": text}), paths[0])
        self.refused(self.prepare(paths[0]), "one.parquet: text in it is not UTF-8", "0xff")
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([b"a"])}), paths[0])
        self.refused(self.prepare(paths[0]), "one.parquet, record 1: field text", "it is bytes")
        paths[0].write_bytes(paths[1].read_bytes()[:-9])
        self.refused(self.prepare(paths[0]), "one.parquet: not a whole file")
        paths[3].write_bytes(b"ARROW1\0\0" + bytes(50))
        self.refused(self.prepare(paths[3]), "file.arrow: not a whole file")

    def test_packages_that_are_missing_are_named(self):
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), self.root / "a.parquet")
        files = {"pyarrow": self.root / "a.parquet", "zstandard": self.file("a.jsonl.zst", zstd(b'{"text": "a"}'))}
        for package, path in files.items():
            self.file(f"without/{package}.py", "raise ImportError\n")
            command = [sys.executable, TOOL, "--tokenizer", self.model, "--out", self.out, path]
            result = subprocess.run(command, capture_output=True, text=True,
                                    env={**os.environ, "PYTHONPATH": str(self.root / "without")})
            self.refused(result, path.name, f"pip install {package}")

    def test_what_is_no_text_is_refused_by_byte(self):
        cases = [
            ("u16.txt", "Hello".encode("utf-16"), "byte 0: text in UTF-16", "iconv -f UTF-16"),
            ("u16le.jsonl", '{"text": "a"}'.encode("utf-16-le"), "byte 1 is NUL", "UTF-16"),
            ("u16be.txt", b"\xfe\xff" + "a".encode("utf-16-be"), "byte 0: text in UTF-16", "iconv"),
            ("u32.txt", "Hello".encode("utf-32"), "byte 0: text in UTF-32", "iconv -f UTF-32"),
            ("latin.txt", b"caf\xe9 cr\xe8me\n", "byte 3 (0xe9) is not UTF-8", "iconv -f LATIN1"),
            ("late.txt", b"a" * 100000 + b"\xe9", "byte 100000 (0xe9)", "LATIN1"),
            ("nul.txt", b"a" * 70000 + b"\0", "byte 70000 is NUL", "leave it out"),
            ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "latin.jsonl, line 2: byte 24 (0xe9)", "LATIN1"),
            ("nul.jsonl", b'{"text": "a"}\n{"text": "\0"}\n', "byte 24 is NUL", "leave"),
            ("a.npy", b"\x93NUMPY\x01\x00", "byte 0: an array of NumPy", "tandem train --data NAME.npy"),
            ("a.idx", b"MMIDIDX\0\0" + bytes(40), "byte 0: an index", "text that it was made of"),
            ("a.zip", b"PK\x03\x04" + bytes(30), "byte 0: a zip archive", "unpack"),
            ("a.docx", b"PK\x03\x04" + bytes(30), "a zip archive", "unpack"),
            ("a.pdf", b"%PDF-1.7\n%\xe2\xe3", "a PDF", "extract"),
            ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(9), "an image", "leave it out"),
            ("a.jpg", b"\xff\xd8\xff\xe0" + bytes(9), "an image", "leave it out"),
            ("a.safetensors", (99).to_bytes(8, "little") + b'{"a":{}}', "a safetensors file", "leave it out"),
            ("a.gguf", b"GGUF\3\0\0\0", "a model in GGUF", "leave it out"),
            ("a.bz2", b"BZh91AY&SY\xff\0", "compressed by bzip2", "bunzip2"),
            ("a.xz", b"\xfd7zXZ\0\0", "compressed by xz", "unxz"),
            ("a.tar", b"name" + bytes(253) + b"ustar\0", "a tar archive", "unpack"),
            ("a.txt", b"PAR1\x15\x04", "Parquet", "name it NAME.parquet"),
            ("a.jsonl.gz", b'{"text": "a"}', "not compressed as .gz is", "rename"),
            ("cut.jsonl.gz", gzip.compress(LINES.encode())[:-20], "cannot be unpacked", "get it again"),
            ("bad.jsonl.gz", gzip.compress(LINES.encode())[:60] + bytes(9), "cannot be unpacked", "get it again"),
            ("cut.jsonl.zst", b"\x28\xb5\x2f\xfd\x24\xff\xff\xff", "cannot be unpacked", "get it again"),
            ("binary.jsonl.gz", gzip.compress(b"\x89PNG\r\n\x1a\n"), "an image", "leave it out"),
        ]
        for name, content, *words in cases:
            with self.subTest(name):
                self.refused(self.prepare(self.file(name, content)), name, *words)
        self.file("ids.bin", bytes(range(64)))
        self.file("ids.idx", b"MMIDIDX\0")
        self.refused(self.prepare(self.root / "ids.bin"), "ids.bin: token ids beside an index ids.idx")

    def test_json_that_is_wrong_is_told_by_line(self):
        deep = '{"text": ' + "[" * 100000 + "]" * 100000 + "}"
        cases = [("a.jsonl", '{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3: not a line of JSON"),
                 ("deep.jsonl", '{"text": "a"}\n' + deep, "deep.jsonl, line 2: its JSON is nested too deep"),
                 ("deep.json", '[{"text": "a"},\n' + deep + "]", "deep.json, line 2 (record 2): its JSON is nested too deep"),
                 ("list.jsonl", '{"text": "a"}\n"b"\n', "list.jsonl, line 2: a record is an object"),
                 ("open.json", '[{"text": "a"},\n\n{"text": "b"}\n', "open.json, line 4: not JSON"),
                 ("comma.json", '[{"text": "a"}\n{"text": "b"}]', "comma.json, line 2: not JSON (no comma after record 1)"),
                 ("array.json", '[{"text": "a"},\n{"text": 5}]', "array.json, line 2 (record 2): field text"),
                 ("spread.json", '{\n "text": "a",\n "b": }\n', "spread.json, line 3: not JSON"),
                 ("gone.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"no": 1}\n'), "gone.jsonl.gz, line 2: a record needs"),
                 ("half.jsonl", '{"text": "a\\ud800b"}\n', "half.jsonl, line 1: \\ud800 is half"),
                 ("big.jsonl", '{"text": ' + "9" * 5000 + "}", "big.jsonl, line 1: a number of more than 4300 digits; write it as text"),
                 ("big.json", '[{"text":\n ' + "9" * 5000 + "}]", "big.json, line 1: a number of more than 4300 digits"),
                 ("twice.jsonl", '{"text": "a"}\n{"text": "a", "text": "b"}\n', 'twice.jsonl, line 2: the key "text" stands twice'),
                 ("twice.json", '[{"text": "a"},\n{"text": "a", "m": {"k": 1, "k": 2}}]', 'twice.json, line 2 (record 2): the key "k" stands'),
                 ("held.json", json.dumps({"version": "1", "data": [{"text": "a"}]}), "held.json, line 1: the records are a list in field "
                  "'data'; write that list alone: jq '.[\"data\"]'"),
                 ("held.jsonl", '{"ids": [1], "no": [{"a": 1}]}', "held.jsonl, line 1: a record needs")]
        for name, content, *words in cases:
            with self.subTest(name):
                self.refused(self.prepare(self.file(name, content)), *words)

    def test_tables_of_values_are_refused_with_how_to_convert_them(self):
        for name in ("a.csv", "A.TSV", "a.csv.gz", "d/a.csv"):
            content = "instruction,output\na,b\n".encode()
            path = self.file(name, gzip.compress(content) if name.endswith("gz") else content)
            for given in {path, path.parent} if name.startswith("d/") else {path}:
                self.refused(self.prepare(given), f"{path}: a table of values", f"pandas.read_csv('{path.name}'",
                             "sep='\\t').to_json(" if "TSV" in name else "').to_json(")

    def test_a_nul_far_behind_the_beginning_is_refused(self):
        for name, content, at in (("a.txt", b"a" * 300000 + b"\0b", 300000),
                                  ("a.jsonl", b'{"text": "a"}\n' * 20000 + b'{"text": "\0"}\n', 280010)):
            self.refused(self.prepare(self.file(name, content)), f"byte {at} is NUL")

    def test_what_is_no_regular_file_is_told(self):
        os.mkfifo(self.root / "pipe")
        for path in ("/dev/null", self.root / "pipe"):
            self.refused(self.prepare(path), f"{path}: not a regular file; write what it gives to a file")

    def test_lines_are_counted_in_the_file_in_every_part(self):
        lines = ['{"text": "%d"}' % i for i in range(500)]
        lines[431] = '{"nothing": 1}'
        path = self.file("r.jsonl", "\n".join(lines))
        for part_bytes in ("200", "100000"):
            result = self.prepare("--part-bytes", part_bytes, path)
            self.assertEqual(result.returncode, 2)
            self.assertIn("r.jsonl, line 432: a record needs", result.stderr.splitlines()[-1])

    def test_what_is_left_out_of_a_folder_is_told(self):
        self.file("d/a.txt", "a")
        self.file("d/.hidden", "b")
        self.file("d/.cache/x.txt", "b")
        self.file("d/.git/config", "b")
        self.file("d/sub/.gitattributes", "b")
        self.file("d/empty.txt", "")
        self.file("d/sub/data/part-0.jsonl", '{"text": "c"}\n')
        self.file("d/sub/README.md", "---\nlicense: mit\n---\n# Card\n")
        self.file("d/sub/dataset_infos.json", "{}")
        self.file("d/code/README.md", "# Of code\n")
        result = self.succeed(self.prepare("--show", "0", self.root / "d"))
        self.assertEqual(self.text_and_targets()[0], "a<|endoftext|># Of code\n<|endoftext|>c<|endoftext|>")
        lines = [line for line in result.stderr.splitlines() if line.startswith("left out")]
        self.assertEqual(len(lines), 3, lines)
        for line, why, names in zip(lines, ("as hidden", "as descriptions of a data set", "as empty"),
                                    ([".hidden", ".cache", ".git", ".gitattributes"], ["README.md", "dataset_infos.json"],
                                     ["empty.txt"])):
            self.assertIn(why, line)
            for name in names:
                self.assertIn(name, line)
        # Files that are named are read.
        self.succeed(self.prepare("--show", "0", self.root / "d" / ".hidden", self.root / "d" / "sub" / "README.md"))
        self.assertTrue(self.text_and_targets()[0].startswith("b<|endoftext|>---\n"))
        self.out = self.root / "other.bin"
        self.file("e/.hidden", "b")
        self.refused(self.prepare(self.root / "e"), "it holds no files but hidden ones")
        self.refused(self.prepare(self.file("none.txt", "")), "no tokens", )
        self.refused(self.prepare(self.root / "nothing"), "no such file")

    def test_parts_change_nothing(self):
        lines = "".join(json.dumps({"prompt": f"{i}+{i}=", "completion": f"{2 * i}"}) + "\n" for i in range(300))
        records = self.file("r.jsonl", lines)
        whole = self.read(records)
        self.succeed(self.prepare("--part-bytes", "500", "--workers", "2", records))
        self.assertEqual(self.written(), whole)
        self.assertFalse(self.out.with_suffix(".parts").exists())

    def test_a_killed_run_goes_on_with_the_parts_that_are_missing(self):
        lines = "".join(json.dumps({"text": f"{i} and {i * i} and so on, " * 20}) + "\n" for i in range(1000))
        records = self.file("r.jsonl", lines)
        whole = self.read(records)
        self.out = self.root / "killed.bin"
        arguments = ["--part-bytes", "20000", "--workers", "2", "--out", self.out, records]
        process = subprocess.Popen([sys.executable, TOOL, "--tokenizer", self.model, *map(str, arguments)], start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(self.root.glob("killed.parts/*/*.json"))) < 3:
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        self.assertEqual(process.wait(), -signal.SIGKILL, "it ended before it could be killed")
        self.assertFalse(self.out.exists())
        result = self.succeed(self.prepare(*arguments))
        going_on = re.search(r"going on with (\d+) of (\d+) parts", result.stderr)
        self.assertLess(int(going_on.group(1)), int(going_on.group(2)))
        self.assertEqual(self.written(), whole)
        self.assertFalse(self.out.with_suffix(".parts").exists())


if __name__ == "__main__":
    main()
