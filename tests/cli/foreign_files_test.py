"""Files that are something else than they would be taken for: model folders without safetensors, token files without a
width, text that is no text. Each is read right, or refused in one line that says what to do."""
import gzip
import json
import os
import struct
import zipfile

from program import ProgramTest, main


def safetensors(tensors):
    """A file of (dtype, shape, bytes) by name."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def npy(descr, shape, content, order=False, version=1):
    header = repr({"descr": descr, "fortran_order": order, "shape": shape}).encode()
    header += b" " * ((64 - (len(header) + 11) % 64) % 64) + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + content


class Folders(ProgramTest):
    CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True}

    def setUp(self):
        super().setUp()
        self.ids = self.file("ids.bin", struct.pack("<3000H", *[i * i % 251 for i in range(3000)]))

    def folder(self, name="model", **files):
        """A folder with config.json and the files named, whose dots are written as in `pytorch_model__bin`."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.CONFIG))
        for file, content in files.items():
            path = folder / file.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder

    def trained(self, name="trained"):
        """A folder with weights, as tandem exports them."""
        run = self.root / (name + "-run")
        self.succeed(self.try_model(self.folder(name + "-shape"), "--out", run))
        self.succeed(self.run_program("export", run, "--to", self.root / name))
        return self.root / name

    def try_model(self, model, *flags, cwd=None):
        return self.run_program("train", "--model", model, "--data", self.ids, "--steps", "1", "--seq-len", "16", "--device",
                                "host", "--threads", "1", *flags, cwd=cwd)

    def refuse_model(self, code, words, model, *flags, cwd=None):
        out = self.root / "out"
        line = self.refused(self.try_model(model, "--out", out, *flags, cwd=cwd), code, *words)
        self.assertFalse(out.exists(), "a refused run left files")
        return line

    def test_weights_in_another_format(self):
        for file, words in [("pytorch_model.bin", ["save_pretrained"]),
                            ("pytorch_model.bin.index.json", ["save_pretrained"]),
                            ("pytorch_model-00001-of-00002.bin", ["save_pretrained"]),
                            ("consolidated.00.pth", ["save_pretrained"]),
                            ("model.pt", ["save_pretrained"]), ("last.ckpt", ["save_pretrained"]),
                            ("tiny-Q4_K_M.gguf", ["GGUF", "gguf_file"]),
                            ("zero_pp_rank_0_mp_rank_00_optim_states.pt", ["zero_to_fp32"]),
                            ("global_step10/mp_rank_00_model_states.pt", ["zero_to_fp32"]),
                            ("__0_0.distcp", ["merge-weights"]), (".metadata", ["merge-weights"]),
                            ("pytorch_model_fsdp_0/__0_0.distcp", ["merge-weights"]),
                            ("tf_model.h5", ["TensorFlow"]), ("flax_model.msgpack", ["Flax"]),
                            ("model.ckpt.index", ["TensorFlow"]), ("model.onnx", ["ONNX"])]:
            with self.subTest(file=file):
                folder = self.folder(file.replace("/", "-") + "-of")
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_bytes(b"\0" * 100)
                line = self.refuse_model(4, [str(folder), file.split("/")[0], *words], folder)
                self.assertIn("safetensors", line)
                self.succeed(self.try_model(folder, "--from-scratch"))
                for command in ("eval", "sample"):
                    data = ["--data", self.ids] if command == "eval" else ["--prompt", "1"]
                    self.refused(self.run_program(command, "--model", folder, *data), 4, file.split("/")[0])
                (folder / "config.json").unlink()
                self.refuse_model(2, [file.split("/")[0], "config.json"], folder)

    def test_optimizer_state_beside_safetensors_is_left_alone(self):
        folder = self.trained()
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin"):
            (folder / name).write_bytes(b"\0")
        (folder / "global_step3").mkdir()
        self.succeed(self.try_model(folder))
        shape = self.folder("shape", training_args__bin=b"\0", optimizer__pt=b"\0")
        self.refuse_model(4, ["optimizer.pt"], shape)  # weights were saved beside it, and are missing

    def test_adapters(self):
        alone = self.root / "adapter"
        alone.mkdir()
        config = alone / "adapter_config.json"
        config.write_text('{"r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "org/base"}')
        (alone / "adapter_model.safetensors").write_bytes(safetensors({"a": ("F32", [1], b"\0" * 4)}))
        self.refuse_model(2, ["org/base", "hub's cache", f"--adapter {alone}"], alone)
        base = self.trained()
        for file in alone.iterdir():
            (base / file.name).write_bytes(file.read_bytes())
        self.refuse_model(4, ["missing", "lora_A", "unexpected: a"], base)
        self.succeed(self.try_model(base, "--from-scratch"))
        config.write_text("[" * 100000)
        self.refuse_model(2, ["adapter_config.json"], alone)
        (base / "adapter_config.json").unlink()
        self.refuse_model(2, ["adapter_config.json"], base)

    def test_pointers_and_dangling_links_are_no_weights(self):
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12\n"
        self.refuse_model(4, ["model.safetensors", "git lfs pull"], self.folder("lfs", model__safetensors=pointer))
        folder = self.folder("dangling")
        (folder / "model.safetensors").symlink_to(self.root / "gone")
        self.refuse_model(4, ["model.safetensors"], folder)

    def test_a_file_of_weights_is_no_description(self):
        folder = self.trained()
        self.refuse_model(2, ["model.safetensors", str(folder)], folder / "model.safetensors")
        self.refuse_model(2, ["GGUF"], self.file("a.gguf", b"GGUF\3\0\0\0"))

    def test_a_built_in_name_beside_a_folder(self):
        here = self.root / "here"
        (here / "gpt2").mkdir(parents=True)
        self.refuse_model(2, ["--model gpt2", "./gpt2"], "gpt2", cwd=here)
        (here / "tiny-gpt2").write_text("{}")
        self.refuse_model(2, ["./tiny-gpt2"], "tiny-gpt2", cwd=here)
        # The run's own folder may have the model's name.
        folder = self.root / "own"
        folder.mkdir()
        flags = ["--out", "tiny-llama", "--steps", "2"]
        self.succeed(self.try_model("tiny-llama", *flags, cwd=folder))
        self.succeed(self.try_model("tiny-llama", *flags, "--resume", cwd=folder))

    def test_misspelt_names_get_the_nearest(self):
        for typed, meant in [("tinygpt2", "tiny-gpt2"), ("gpt-2", "gpt2"), ("llama3.2", "llama3.2-1b"),
                             ("Qwen3-0.6B", "qwen3-0.6b"), ("llama-3.1-8b", "llama3.1-8b")]:
            with self.subTest(typed=typed):
                self.refuse_model(2, [typed, meant], typed)
        self.assertNotIn("gpt2-xl", self.refuse_model(2, ["no-such-model-at-all"], "no-such-model-at-all"))

    def hub(self, source=None, revision="0123abcd", main="0123abcd", name="models--org--small"):
        """A cache of the hub, whose snapshots are links to blobs."""
        cache = self.root / "hub" / name
        (cache / "refs").mkdir(parents=True, exist_ok=True)
        (cache / "blobs").mkdir(exist_ok=True)
        snapshot = cache / "snapshots" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        (cache / "refs" / "main").write_text(main)
        for i, file in enumerate(sorted(source.iterdir()) if source else []):
            (cache / "blobs" / str(i)).write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(f"../../blobs/{i}")
        return snapshot

    def environment(self):
        return {**super().environment(), "HF_HUB_CACHE": str(self.root / "hub")}

    def test_names_of_the_hub(self):
        self.refuse_model(2, ["org/small", "hf download org/small"], "org/small")
        trained = self.trained()
        snapshot = self.hub(trained)
        named, plain = self.root / "named", self.root / "plain"
        self.succeed(self.try_model("org/small", "--out", named))
        self.succeed(self.try_model(trained, "--out", plain))
        self.assertEqual(self.summary(named)["state_digest"], self.summary(plain)["state_digest"])
        self.assertEqual(self.summary(named)["model"], "small")
        self.assertEqual(self.summary(named)["lr"] if "lr" in self.summary(named) else 0, 0)
        self.succeed(self.run_program("train", "--resume", "--out", named))
        (snapshot / "model.safetensors").unlink()
        self.refuse_model(2, ["org/small", "hf download org/small", "not whole"], "org/small")
        self.succeed(self.try_model("org/small", "--from-scratch"))
        (snapshot.parents[1] / "refs" / "main").unlink()
        self.refuse_model(2, ["hf download org/small"], "org/small")

    def test_a_folder_of_links(self):
        trained = self.trained()
        (trained / "tokenizer.json").write_text("{}")
        snapshot = self.hub(trained)
        out = self.root / "linked"
        self.succeed(self.try_model(snapshot, "--out", out))
        self.succeed(self.run_program("export", snapshot, "--to", self.root / "copy"))
        self.assertTrue((self.root / "copy" / "tokenizer.json").is_file())
        self.assertEqual((self.root / "copy" / "model.safetensors").read_bytes(), (trained / "model.safetensors").read_bytes())

    def test_a_tied_model_with_its_head_alone(self):
        trained = self.trained()
        content = (trained / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        head = json.loads(content[8:8 + length])
        head["lm_head.weight"] = head.pop("model.embed_tokens.weight")
        text = json.dumps(head).encode()
        other = self.root / "head"
        other.mkdir()
        (other / "config.json").write_bytes((trained / "config.json").read_bytes())
        (other / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length:])
        digests = []
        for name, model in [("a", trained), ("b", other)]:
            self.succeed(self.try_model(model, "--out", self.root / name))
            digests.append(self.summary(self.root / name)["state_digest"])
        self.assertEqual(*digests)

    def test_a_tensor_in_two_shards(self):
        trained = self.trained()
        whole = (trained / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        head = json.loads(whole[8:8 + length])
        head.pop("__metadata__", None)
        body = whole[8 + length:]
        tensors = {n: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for n, t in head.items()}
        norm = "model.norm.weight"
        folder = self.folder("shards")
        index = {n: "model-00001-of-00002.safetensors" for n in tensors} | {norm: "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors(tensors))
        second = folder / "model-00002-of-00002.safetensors"
        second.write_bytes(safetensors({norm: tensors[norm]}))
        for name, model in [("a", trained), ("b", folder)]:
            self.succeed(self.try_model(model, "--out", self.root / name))
        self.assertEqual(*[self.summary(self.root / n)["state_digest"] for n in "ab"])
        second.write_bytes(safetensors({norm: ("BF16", [16], b"\1" * 32)}))
        self.refuse_model(4, [norm, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], folder)

    def test_types_of_tensors_that_are_not_read(self):
        for dtype, bits in [("F8_E4M3", 8), ("F8_E5M2", 8), ("F8_E8M0", 8), ("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6),
                            ("C64", 64), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("F128", None)]:
            with self.subTest(dtype=dtype):
                bytes_ = 16 * (bits or 8) // 8
                folder = self.folder(dtype, model__safetensors=safetensors(
                    {"model.norm.weight": (dtype, [16], b"\0" * bytes_)}))
                line = self.refuse_model(4, ["model.norm.weight", dtype, "F32, F16 and BF16"], folder)
                self.assertNotIn("corrupt", line)

    def test_numbers_that_json_has_not(self):
        folder = self.folder()
        text = json.dumps({**self.CONFIG, "time_step_limit": [0.0, float("inf")], "other": float("nan"),
                           "low": float("-inf"), "text": "Infinity and NaN"})
        (folder / "config.json").write_text(text)
        self.succeed(self.try_model(folder))
        (folder / "config.json").write_text(json.dumps({**self.CONFIG, "rms_norm_eps": float("nan")}))
        self.refuse_model(2, ["rms_norm_eps", "NaN"], folder)
        (folder / "config.json").write_text(json.dumps({**self.CONFIG, "vocab_size": float("inf")}))
        self.refuse_model(2, ["vocab_size", "Infinity"], folder)
        (folder / "config.json").write_text('{"vocab_size": Infinit}')
        self.refuse_model(2, ["not JSON"], folder)

    def test_deep_nesting(self):
        deep = b'{"a": ' * 100000 + b"1" + b"}" * 100000
        folder = self.folder()
        (folder / "config.json").write_bytes(deep)
        self.refuse_model(2, ["nested too deep"], folder)
        (self.root / "ids.json").write_bytes(deep)
        self.refuse_model(4, ["ids.json", "nested too deep"], self.trained_name())

    def trained_name(self):
        return self.folder("plain")

    def test_files_of_the_tokenizer_travel_with_the_model(self):
        files = {name: name.encode() for name in (
            "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
            "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.json", "chat_template.jinja",
            "generation_config.json", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja")}
        model = self.trained()
        for name, content in files.items():
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_bytes(content)
        run, first, second = self.root / "run", self.root / "first", self.root / "second"
        self.succeed(self.run_program("export", model, "--to", first))
        self.succeed(self.try_model(model, "--out", run))
        self.succeed(self.run_program("export", run, "--to", second))
        for folder in (first, second):
            for name, content in files.items():
                self.assertEqual((folder / name).read_bytes(), content, name)
        self.succeed(self.run_program("eval", "--model", second, "--data", self.ids, "--seq-len", "16"))


class Tokens(ProgramTest):
    def model(self, vocabulary):
        """A shape, of which weights are random."""
        return self.file(f"shape-{vocabulary}/config.json", json.dumps({**Folders.CONFIG, "vocab_size": vocabulary}))

    def take(self, data, *flags, vocabulary=256):
        return self.run_program("train", "--model", self.model(vocabulary), "--data", data, "--steps", "1", "--seq-len", "16",
                                "--device", "host", "--threads", "1", *flags)

    def first_loss(self, data, *flags, vocabulary=256):
        out = self.root / f"out-{len(list(self.root.iterdir()))}"
        self.succeed(self.take(data, "--out", out, *flags, vocabulary=vocabulary))
        return self.summary(out)["first_loss"]

    def test_a_width_that_nothing_states(self):
        wide = struct.pack("<200I", *[i * 7 % 251 for i in range(200)])
        data = self.file("wide.bin", wide)
        # Valid as 400 tokens of 16 bits too, of which every second is 0.
        self.refused(self.take(data), 4, "wide.bin", "--token-dtype uint32")
        self.assertEqual(self.first_loss(data, "--token-dtype", "uint32"),
                         self.first_loss(self.file("narrow.bin", struct.pack("<200H", *[i * 7 % 251 for i in range(200)]))))
        self.refused(self.take(self.file("i64.bin", struct.pack("<200Q", *[i % 251 for i in range(200)]))), 4, "64-bit")
        # Beyond 65,536 nothing is assumed.
        large = self.file("large.bin", struct.pack("<200I", *[i * 601 for i in range(200)]))
        self.refused(self.take(large, vocabulary=128256), 4, "large.bin", "--token-dtype uint32", "128256")
        self.succeed(self.take(large, "--token-dtype", "uint32", vocabulary=128256))
        self.file("large.json", '{"dtype": "uint32"}')
        self.succeed(self.take(large, vocabulary=128256))

    def test_numpy_arrays(self):
        values = [i * 7 % 251 for i in range(200)]
        expected = self.first_loss(self.file("a.bin", struct.pack("<200H", *values)))
        for descr, code in [("<u2", "H"), ("<i4", "i"), ("<u4", "I"), ("<i8", "q"), ("<u8", "Q")]:
            with self.subTest(descr=descr):
                data = self.file(f"{descr[1:]}.npy", npy(descr, (200,), struct.pack(f"<200{code}", *values)))
                self.assertEqual(self.first_loss(data), expected)
        data = self.file("v2.npy", npy("<u2", (200,), struct.pack("<200H", *values), version=2))
        self.assertEqual(self.first_loss(data), expected)
        self.assertEqual(self.first_loss(self.file("named.bin", data.read_bytes())), expected)
        self.refused(self.take(self.file("neg.npy", npy("<i8", (40,), struct.pack("<40q", *[-1] * 40)))), 4, "position 0")
        for name, content, word in [
                ("two.npy", npy("<u2", (2, 100), struct.pack("<200H", *values)), "(2, 100)"),
                ("float.npy", npy("<f4", (200,), b"\0" * 800), "<f4"), ("big.npy", npy(">u2", (200,), b"\0" * 400), ">u2"),
                ("short.npy", npy("<u2", (200,), b"\0" * 399), "400 bytes"), ("none.npy", b"\x93NUMPY\1", "header"),
                ("text.npy", b"hello" * 20, "no NumPy"), ("object.npy", npy("|O", (3,), b"\x80\4."), "|O"),
                ("pickled.bin", b"PK\3\4" + b"x" * 396, "zip")]:
            with self.subTest(name=name):
                self.refused(self.take(self.file(name, content)), 4, name, word)

    def test_an_index_beside_a_token_file(self):
        values = [i * 7 % 251 for i in range(200)]

        def index(code, sizes, width):
            starts, at = [], 0
            for size in sizes:
                starts.append(at)
                at += size * width
            return (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), 2) + struct.pack(f"<{len(sizes)}i", *sizes)
                    + struct.pack(f"<{len(sizes)}q", *starts) + struct.pack("<2q", 0, len(sizes)))

        expected = self.first_loss(self.file("a.bin", struct.pack("<200H", *values)))
        for code, letter, width in [(8, "H", 2), (4, "i", 4), (5, "q", 8)]:
            data = self.file(f"m{code}.bin", struct.pack(f"<200{letter}", *values))
            self.file(f"m{code}.idx", index(code, [150, 50], width))
            self.assertEqual(self.first_loss(data), expected)
        for name, content, word in [("f", index(6, [200], 2), "floating point"), ("old", b"TNTIDX\0\0" + b"\0" * 50, "not known"),
                                    ("cut", index(8, [150, 49], 2), "other"), ("less", index(8, [200], 2)[:40], "cut off")]:
            data = self.file(f"{name}.bin", struct.pack("<200H", *values))
            self.file(f"{name}.idx", content)
            self.refused(self.take(data), 4, f"{name}.idx", word)

    def test_a_tokenizer_with_a_few_more_entries(self):
        data = self.file("a.bin", struct.pack("<200H", *[i % 251 for i in range(200)]))
        self.file("a.json", '{"dtype": "uint16", "vocab_size": 257}')
        result = self.succeed(self.take(data))
        self.assertIn("257", result.stderr)
        self.file("a.bin", struct.pack("<200H", *[i % 257 for i in range(200)] ) + struct.pack("<100H", *[256] * 100))
        self.refused(self.take(data), 4, "token 256")
        self.file("a.json", '{"dtype": "uint16", "vocab_size": 32000}')
        self.refused(self.take(data), 4, "vocabulary of 32000")


class Texts(ProgramTest):
    def take(self, *data, flags=()):
        return self.run_program("train", "--model", "tiny-gpt2", "--data", *data, "--steps", "1", "--seq-len", "16", "--device",
                                "host", "--threads", "1", *flags)

    LINE = "The quick brown fox jumps over the lazy dog. " * 20

    def test_kinds_of_files_that_are_no_text(self):
        archive = self.root / "zipped"
        with zipfile.ZipFile(archive, "w") as z:
            z.writestr("a.txt", self.LINE)
        for name, content, word in [
                ("gz", gzip.compress(self.LINE.encode()), "gzip"), ("zip", archive.read_bytes(), "zip"),
                ("pq", b"PAR1" + b"x" * 500, "Parquet"), ("arrow", b"ARROW1" + b"x" * 500, "Arrow"),
                ("npy", npy("<u2", (200,), b"a" * 400), "NumPy"), ("pdf", b"%PDF-1.7\n" + self.LINE.encode(), "PDF"),
                ("png", b"\x89PNG\r\n\x1a\n" + b"x" * 500, "PNG"), ("jpg", b"\xff\xd8\xff\xe0" + b"x" * 500, "JPEG"),
                ("gif", b"GIF89a" + b"x" * 500, "GIF"), ("zst", b"\x28\xb5\x2f\xfd" + b"x" * 500, "zstd"),
                ("xz", b"\xfd7zXZ\0" + b"x" * 500, "xz"), ("bz2", b"BZh91AY&SY" + b"x" * 500, "bzip2"),
                ("st", safetensors({"a": ("F32", [100], b"abcd" * 100)}), "safetensors"),
                ("gguf", b"GGUF" + b"x" * 500, "GGUF"), ("lite", b"SQLite format 3\0" + b"x" * 500, "SQLite"),
                ("u16", self.LINE.encode("utf-16"), "UTF-16"), ("u16be", b"\xfe\xff" + self.LINE.encode("utf-16-be"), "UTF-16"),
                ("u32", self.LINE.encode("utf-32"), "UTF-32"), ("lfs", b"version https://git-lfs.github.com/spec/v1\n" * 9, "LFS"),
                ("nul", self.LINE.encode() + b"\0" + self.LINE.encode(), f"byte {len(self.LINE)}")]:
            with self.subTest(name=name):
                line = self.refused(self.take(self.file(f"t-{name}.txt", content)), 4, f"t-{name}.txt", word)
                self.assertGreaterEqual(line.count("; "), 1, line)  # advice on what to do
                self.file(f"folder-{name}/a.txt", self.LINE)
                self.file(f"folder-{name}/b.txt", content)
                self.refused(self.take(self.root / f"folder-{name}"), 4, "b.txt", word)

    def test_records_are_not_trained_on_as_text(self):
        for name in ("a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.jsonl.gz", "a.csv", "a.TSV", "a.parquet", "a.arrow", "a.tar",
                     "a.zst"):
            with self.subTest(name=name):
                data = self.file(name, (json.dumps({"text": self.LINE}) + "\n") * 3)
                self.refused(self.take(data), 4, name, "tools/prepare_data.py")
        self.file("folder/a.txt", self.LINE)
        self.file("folder/train.json", json.dumps([{"instruction": self.LINE}]))
        self.refused(self.take(self.root / "folder"), 4, "train.json", "tools/prepare_data.py")
        self.file("folder/train.json", '{"name": "settings of a program", "version": 3}')
        self.succeed(self.take(self.root / "folder"))

    def test_a_byte_order_mark_is_left_out(self):
        digests = []
        for name, content in [("plain.txt", self.LINE.encode()), ("mark.txt", b"\xef\xbb\xbf" + self.LINE.encode())]:
            out = self.root / f"out-{name}"
            result = self.succeed(self.take(self.file(name, content), flags=["--out", out]))
            digests.append(self.summary(out)["state_digest"])
        self.assertEqual(*digests)
        self.assertIn("byte-order mark", result.stderr)

    def test_what_is_left_out_of_folders_is_told(self):
        self.file("folder/a.txt", self.LINE)
        plain = self.root / "plain"
        self.succeed(self.take(self.root / "folder", flags=["--out", plain]))
        for name in (".gitattributes", ".cache/huggingface/download/a.txt.metadata", "sub/.DS_Store", ".a.txt.swp"):
            self.file(f"folder/{name}", "other text " * 20)
        self.file("folder/empty.txt", "")
        (self.root / "folder" / "link.txt").symlink_to("a.txt")
        out = self.root / "out"
        result = self.succeed(self.take(self.root / "folder", flags=["--out", out]))
        self.assertEqual(self.summary(plain)["state_digest"], self.summary(out)["state_digest"])
        for words in ("4 hidden files", "1 empty", "1 link"):
            self.assertEqual(result.stderr.count(words), 1, result.stderr)
        (self.root / "only").mkdir()
        (self.root / "only" / "link.txt").symlink_to("../folder/a.txt")
        self.refused(self.take(self.root / "only"), 4, "links")
        self.file("concealed/.a.txt", self.LINE)
        self.refused(self.take(self.root / "concealed"), 4, "1 hidden")


class Resuming(ProgramTest):
    def test_other_data_of_the_same_size_is_noticed(self):
        data = self.file("a.txt", "one two three four " * 40)
        out = self.root / "out"
        self.succeed(self.train("--steps", "2", "--out", out, data=data))
        before = data.read_text()
        data.write_text(before.replace("two", "owt"))
        result = self.train("--steps", "3", "--out", out, "--resume", data=data)
        self.refused(result, 4, "--data", "other", "step-00000002")
        data.write_text(before)
        moved = data.rename(self.root / "b.txt")
        self.succeed(self.train("--steps", "3", "--out", out, "--resume", data=moved))
        # Checkpoints of earlier versions do not know.
        path = out / "checkpoints" / "step-00000003" / "manifest.json"
        manifest = json.loads(path.read_text())
        self.assertRegex(manifest.pop("data_digest"), "^[0-9a-f]{32}$")
        path.write_text(json.dumps(manifest))
        moved.write_text(before.replace("two", "owt"))
        self.succeed(self.train("--steps", "4", "--out", out, "--resume", data=moved))

    def test_masks_are_part_of_the_data(self):
        data = self.file("a.bin", struct.pack("<400H", *[i * i % 251 for i in range(400)]))
        mask = self.file("a.mask.bin", b"\1" * 400)
        out = self.root / "out"
        self.succeed(self.train("--steps", "1", "--out", out, data=data))
        mask.write_bytes(b"\1" * 399 + b"\0")
        self.refused(self.train("--steps", "2", "--out", out, "--resume", data=data), 4, "--data", "other")


if __name__ == "__main__":
    main()
