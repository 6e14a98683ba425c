"""Wrong input gets one line and the documented exit code, and leaves nothing behind."""
import json
import os
import struct
import subprocess

from program import PROGRAM, SMALL, ProgramTest, main


def safetensors(tensors):
    header, data = {}, b""
    for name, shape in tensors.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
        data += b"\0" * (4 * count)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class Flags(ProgramTest):
    def refuse_train(self, code, words, *arguments, data=None):
        out = self.root / "out"
        result = self.train("--steps", "2", "--out", out, *arguments, data=data)
        self.assertFalse(out.exists(), "a refused run left files")
        return self.refused(result, code, *words)

    def test_unknown_flag(self):
        self.refuse_train(2, ["--no-such-flag"], "--no-such-flag", "3")

    def test_words_that_are_no_utf8(self):
        # Such words would go into config.toml and summary.json, which could not be read again.
        for arguments in [("--out", os.fsencode(self.root) + b"/caf\xe9"), ("--freeze", b"\xff")]:
            result = subprocess.run([PROGRAM, "train", "--model", "tiny-gpt2", "--data", str(self.text), "--steps", "1",
                                     *arguments], capture_output=True, text=True, timeout=60)
            self.refused(result, 2, "no UTF-8")
        self.assertEqual(sorted(p.name for p in self.root.iterdir()), ["text.txt"])

    def test_a_pipe_is_no_data(self):
        pipe = self.root / "pipe"
        os.mkfifo(pipe)
        self.refuse_train(4, ["not a regular file"], data=pipe)

    def test_a_trace_that_cannot_be_written_is_told_before_the_run(self):
        for trace in (self.root, self.root / "missing" / "trace.json"):
            result = self.train("--steps", "2", "--trace", trace)
            self.refused(result, 7, f"cannot write {trace}")
            self.assertNotIn("step 1/", result.stdout)

    def test_nothing_to_resume(self):
        self.refused(self.run_program("train", "--resume", "--out", self.root / "none"), 2, "--resume", "holds no run")
        self.refused(self.run_program("train", "--resume"), 2, "--resume", "no --out")

    def test_no_or_unknown_subcommand(self):
        self.refused(self.run_program(), 2, "subcommand")
        self.refused(self.run_program("fly"), 2)

    def test_values_out_of_range(self):
        for flag, value in [("--steps", "0"), ("--steps", "-3"), ("--steps", "many"), ("--micro-batch", "0"),
                            ("--grad-accum", "0"), ("--beta1", "1.0"), ("--beta2", "-0.1"), ("--eps", "0"),
                            ("--eps", "1e-46"), ("--lr", "-1"), ("--lr", "nan"), ("--lr", "1e300"),
                            ("--clip", "-1"), ("--weight-decay", "x"),
                            ("--threads", "0"), ("--seq-len", "0"), ("--device-memory", "0"),
                            ("--device-memory", "lots"), ("--link-bandwidth", "5"), ("--link-bandwidth", "0.4B/s"), ("--lr-schedule", "zigzag"),
                            ("--recompute", "some"), ("--recompute", "block:"), ("--recompute", "block:-1"),
                            ("--recompute", "block:2x"), ("--recompute", "block:5"), ("--recompute", "block:5,selective"),
                            ("--recompute", "block:2,select"), ("--recompute", "selective:2"), ("--state", "half"), ("--compute", "fp16"),
                            ("--freeze", "("), ("--seed", "-1"), ("--subgroup-size", "0"),
                            ("--prefetch-layers", "0"), ("--resident-layers", "-2"), ("--token-dtype", "int7"),
                            ("--on-nonfinite", "pray"), ("--keep", "-1"), ("--on-save-failure", "pray"),
                            ("--metrics-port", "-1"), ("--patience", "-1")]:
            with self.subTest(flag=flag, value=value):
                self.refuse_train(2, [flag, value], flag, value)

    def test_flags_that_say_nothing_alone(self):
        for flag, value, other in [("--fp8-gradients", "e5m2", "--compute fp8"), ("--fp8-accumulation", "fast", "--compute fp8"),
                                   ("--dpo-beta", "0.3", "--objective dpo"), ("--dpo-reference", "step", "--objective dpo")]:
            with self.subTest(flag=flag):
                self.refuse_train(2, [flag, other], flag, value)

    def test_a_switch_is_not_taken_and_taken_back_at_once(self):
        self.refuse_train(2, ["--keep-best", "--no-keep-best"], "--keep-best", "--no-keep-best")
        self.refuse_train(2, ["--no-steps"], "not expected", "--no-steps")

    def test_a_second_value_is_refused_where_a_flag_takes_one(self):
        for command, flag, values in [
                ("train", "--steps", "1 2"), ("train", "--lr", "1e-4 1e-5"), ("train", "--state", "fp32 split"),
                ("train", "--micro-batch", "2 8"), ("plan", "--model", "tiny-gpt2 gpt2"), ("plan", "--policy", "host stream"),
                ("plan", "--link-bandwidth", "1GB/s 2GB/s"), ("bench", "--model", "tiny-gpt2 gpt2"),
                ("bench", "--state", "fp32 split"), ("bench", "--grad-accum", "2 4"), ("bench", "--seq-len", "64 128"),
                ("bench", "--steps", "1 2"), ("calibrate", "--device", "host cuda"), ("calibrate", "--threads", "1 2"),
                ("eval", "--seq-len", "32 64"), ("sample", "--seed", "1 2"), ("sample", "--prompt", "a b"),
                ("digest", "", "a b"), ("export", "--to", "a b")]:
            with self.subTest(command=command, flag=flag):
                source = ["model"] if command == "export" else []
                result = self.run_program(command, *source, *flag.split(), *values.split())
                self.refused(result, 2, "not expected", values.split()[1])

    def test_a_plan_wants_no_data(self):
        self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, "--eval-every", "2", "--keep-best"))

    def test_of_a_flag_given_twice_the_last_counts(self):
        # A plan tells the memory that is free, which is not the same for long.
        plan = ["plan", "--model", "tiny-gpt2", *SMALL, "--device-memory", "1GiB", "--micro-batch"]
        twice = self.succeed(self.run_program(*plan, "4", "--micro-batch", "3")).stdout
        self.assertEqual(twice, self.succeed(self.run_program(*plan, "3")).stdout)
        self.assertIn("micro-batch 3", twice)

    def test_policies_that_are_none(self):
        for policy in ["static:1.5", "static:-0.1", "static:", "interleave:0", "interleave:x",
                       "interleave:2,resident=2", "magic", ""]:
            with self.subTest(policy=policy):
                self.refuse_train(2, ["--policy"], "--policy", policy)

    def test_contradictions(self):
        self.refuse_train(2, ["--epochs"], "--epochs", "1")
        self.refuse_train(2, ["--min-lr"], "--lr", "1e-4", "--min-lr", "1e-3")
        self.refuse_train(2, ["--eval-data"], "--eval-every", "2")
        self.refuse_train(2, ["--freeze"], "--freeze", ".")
        self.refuse_train(2, ["--freeze"], "--freeze", ".*")
        self.refuse_train(2, ["--freeze", "matches no parameter"], "--freeze", "nothing_is_called_so")
        self.refuse_train(2, ["--freeze", "matches no parameter"], "--freeze", "^lm_head")
        self.refuse_train(2, ["--freeze matches 2 of 16 experts", "block.0.mlp.experts.gate_proj.weight"], "--model", "tiny-moe",
                          "--freeze", r"experts\.[35]\.")
        # A pattern with so many paths that one after another they would take years.
        self.refuse_train(2, ["--freeze", "matches no parameter"], "--freeze", "(.*)*!")
        self.refuse_train(2, ["NUMA node 999"], "--numa-node", "999")
        self.refuse_train(2, ["--keep-best"], "--keep-best")
        self.refuse_train(2, ["--patience", "--eval-every"], "--patience", "2")
        self.refuse_train(2, ["--eval-every", "--eval-data"], "--patience", "2", "--eval-every", "1")

    def test_blocks_computed_again(self):
        """Four are all that tiny-gpt2 has; for what is offloaded, all are needed."""
        self.refuse_train(2, ["--recompute block:5", "has 4 blocks", "at most --recompute block:4"],
                          "--recompute", "block:5", "--device", "cuda:7")
        for some in ("none", "block:0", "block:3", "selective", "block:3,selective"):
            self.refuse_train(2, ["--offload-activations"], "--offload-activations", "--recompute", some)
        # Models with fewer are passed over.
        self.succeed(self.run_program("plan", "--device", "host", "--recompute", "block:30", "--device-memory", "8GiB",
                                      "--seq-len", "64", "--fit", "model"))
        for command in ("plan", "bench"):
            self.refused(self.run_program(command, "--model", "tiny-gpt2", "--device", "host", "--recompute", "block:5"),
                         2, "has 4 blocks")

    def test_missing_flags(self):
        self.refused(self.run_program("train", "--data", self.text, "--steps", "1"), 2, "--model")
        self.refused(self.run_program("train", "--model", "tiny-gpt2", "--steps", "1"), 2, "--data")
        self.refused(self.run_program("train", "--model", "tiny-gpt2", "--data", self.text), 2, "--steps")

    def test_unknown_model_and_long_sequence(self):
        self.refused(self.run_program("plan", "--model", "no-such-model"), 2, "no-such-model")
        self.refuse_train(2, ["--seq-len", "256"], "--seq-len", "257")

    def test_devices(self):
        self.refuse_train(5, ["cuda:7"], "--device", "cuda:7")
        # A name that no device can have is a bad flag, told before any file is read.
        for name in ("toaster", "cuda:", "cuda:x", "cuda:-1", "cuda:99999999999", ""):
            with self.subTest(name=name):
                for command in ("train", "plan", "eval", "sample", "bench", "calibrate"):
                    model = [] if command == "calibrate" else ["--model", self.root / "no-such-model"]
                    self.refused(self.run_program(command, *model, "--device", name), 2, "--device", f"'{name}'")

    def test_toml(self):
        self.refuse_train(2, ["colour"], "--config", self.file("a.toml", 'colour = "red"\n'))
        self.refuse_train(2, ["line 1"], "--config", self.file("b.toml", "steps = = 3\n"))
        self.refuse_train(2, ["--lr"], "--config", self.file("c.toml", "lr = -1.0\n"))
        self.refuse_train(4, ["none.toml"], "--config", self.root / "none.toml")

    def test_bad_model_description(self):
        self.refused(self.run_program("plan", "--model", self.file("config.json", "{]")), 2)
        (self.root / "empty").mkdir()
        self.refused(self.run_program("plan", "--model", self.root / "empty"), 2, "config.json")


class Data(ProgramTest):
    def refuse_data(self, code, words, data, *arguments):
        out = self.root / "out"
        result = self.train("--steps", "2", "--out", out, *arguments, data=data)
        self.assertFalse(out.exists(), "a refused run left files")
        self.refused(result, code, *words)

    def test_missing_empty_short(self):
        self.refuse_data(4, ["nowhere"], self.root / "nowhere")
        self.refuse_data(4, ["no tokens"], self.file("empty.txt", ""))
        self.refuse_data(4, ["shorter than one sequence"], self.file("short.txt", "x" * 32))
        (self.root / "hollow").mkdir()
        self.refuse_data(4, ["no files"], self.root / "hollow")

    def test_token_files(self):
        self.refuse_data(4, ["no multiple"], self.file("odd.bin", b"\1\0" * 100 + b"\1"))
        self.refuse_data(4, ["token 256 at position 70"],
                         self.file("big.bin", struct.pack("<200H", *([5] * 70 + [256] + [5] * 129))))

    def test_tokenizer_with_a_larger_vocabulary(self):
        data = self.file("big.bin", struct.pack("<200H", *([5] * 200)))
        self.file("big.json", json.dumps({"dtype": "uint16", "vocab_size": 321}))
        self.refuse_data(4, ["vocabulary of 321", "256"], data)
        self.file("big.json", json.dumps({"dtype": "uint16", "vocab_size": 256, "tokens": 201}))
        self.refuse_data(4, ["promises 201"], data)
        self.file("big.json", "{")
        self.refuse_data(4, ["big.json"], data)

    def test_mask_of_another_length(self):
        data = self.file("a.bin", struct.pack("<200H", *([5] * 200)))
        mask = self.file("a.mask.bin", b"\1" * 199)
        self.refuse_data(4, ["199 bytes", "200 tokens"], data)
        self.file("a.mask.bin", b"\1" * 199 + b"\2")
        self.refuse_data(4, ["byte 199 is 2"], data)
        self.refuse_data(4, ["a mask, not tokens"], mask)

    def test_masks_without_a_target(self):
        tokens = struct.pack("<200H", *([5] * 200))
        data = self.file("masked/a.bin", tokens)
        self.file("masked/a.mask.bin", b"\0" * 200)
        self.refuse_data(4, [str(data), "no token to be a target"], data)
        self.refuse_data(4, [str(data), "no token to be a target"], self.text, "--eval-data", data)
        self.file("masked/b.bin", tokens)  # without a mask: all are
        self.succeed(self.train("--steps", "1", data=self.root / "masked"))

    def test_rows_longer_than_a_sequence(self):
        data = self.file("rows.bin", struct.pack("<200H", *([5] * 200)))
        self.file("rows.json", json.dumps({"dtype": "uint16", "layout": "rows", "row_length": 50}))
        self.refuse_data(4, ["a row has 50 tokens", "--seq-len 49"], data)
        self.file("rows.json", json.dumps({"dtype": "uint16", "layout": "rows", "row_length": 60}))
        self.refuse_data(4, ["no multiple"], data)

    def test_unreadable_folder(self):
        if os.geteuid() == 0 and os.access("/proc/1/mem", os.R_OK):
            target = self.root / "files"  # root reads everything: a file that is no file stands for it
            target.mkdir()
            os.mkfifo(target / "pipe")
            self.refuse_data(4, ["files"], target)
            return
        target = self.file("files/secret.txt", "x" * 100)
        target.chmod(0)
        self.refuse_data(4, ["secret.txt"], target.parent)

    def test_eval_data_is_checked_before_anything_starts(self):
        self.refuse_data(4, ["nowhere"], self.text, "--eval-data", self.root / "nowhere")


class Places(ProgramTest):
    def test_unwritable_out(self):
        self.refused(self.train("--steps", "1", "--out", "/proc/none/run"), 7, "/proc/none")
        self.refused(self.train("--steps", "1", "--out", self.text), 7)

    def test_out_that_holds_a_run(self):
        out = self.root / "out"
        self.succeed(self.train("--steps", "1", "--out", out))
        self.refused(self.train("--steps", "2", "--out", out), 2, "--resume")

    def test_named_checkpoint_that_is_missing(self):
        self.refused(self.train("--steps", "1", "--out", self.root / "o", "--resume", self.root / "none"), 4, "none")

    def test_checkpoint_of_another_model_or_damaged(self):
        out = self.root / "out"
        self.succeed(self.train("--steps", "1", "--out", out))
        checkpoint = out / "checkpoints" / "step-00000001"
        other = self.run_program("train", "--model", "tiny-llama", "--data", self.text, *SMALL, "--steps", "2",
                                 "--out", self.root / "o", "--resume", checkpoint)
        self.refused(other, 4)
        state = bytearray((checkpoint / "state.safetensors").read_bytes())
        state[len(state) // 2] ^= 1
        (checkpoint / "state.safetensors").write_bytes(state)
        self.refused(self.run_program("digest", checkpoint), 4, "state.safetensors")
        self.refused(self.run_program("digest", self.root), 4)
        manifest = checkpoint / "manifest.json"
        whole = json.loads(manifest.read_text())
        for changes, words in [({"format": 3}, ["format is 3", "newer tandem"]), ({"parameters": None}, ["manifest"]),
                               ({"files": [{"name": "../../text.txt", "bytes": 1, "xxh3_128": "0"}]}, ["elsewhere"]),
                               ({"step": -1}, ["manifest"])]:
            manifest.write_text(json.dumps({**whole, **changes}))
            self.refused(self.run_program("digest", checkpoint), 4, *words)
        manifest.write_text(json.dumps({**whole, "format": 3}))
        for resume in (["--resume"], ["--resume", checkpoint]):
            self.refused(self.train("--steps", "2", "--out", out, *resume), 4, "step-00000001", "newer tandem")
        self.assertEqual([p.name for p in (out / "checkpoints").iterdir()], ["step-00000001"])
        manifest.write_text("[" * 200000 + "]" * 200000)
        self.refused(self.run_program("digest", checkpoint), 4, "nested too deep")

    def test_checkpoint_of_other_tokens_or_another_freeze(self):
        out = self.root / "out"
        self.succeed(self.train("--steps", "1", "--out", out))
        ids = self.file("ids.bin", struct.pack("<27000H", *([5] * 27000)))
        self.refused(self.train("--steps", "2", "--out", out, "--resume", data=ids), 4, "trained on bytes")
        self.refused(self.train("--steps", "2", "--out", out, "--resume", "--freeze", "wte"), 4, "frozen")


class Tensors(ProgramTest):
    def exported(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--out", out))
        model = self.root / "model"
        self.succeed(self.run_program("export", out, "--to", model, "--dtype", "fp32"))
        return model

    def test_text_for_loaded_weights(self):
        model = self.exported()
        config = json.loads((model / "config.json").read_text())
        del config["tandem_token_kind"]
        (model / "config.json").write_text(json.dumps(config))
        result = self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "1",
                                  "--out", self.root / "o")
        self.refused(result, 2, "prepare_data.py")
        self.assertFalse((self.root / "o").exists())
        self.refused(self.run_program("eval", "--model", model, "--data", self.text, "--seq-len", "32"), 2,
                     "prepare_data.py")

    def refuse_model(self, model, code, *words):
        return self.refused(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "1"), code,
                            *words)

    def test_tensors_that_do_not_fit(self):
        model = self.exported()
        (model / "model.safetensors").write_bytes(safetensors({"transformer.wpe.weight": [3, 5], "stranger": [2]}))
        line = self.refuse_model(model, 4, "missing", "misshapen", "unexpected")
        self.assertIn("stranger", line)
        (model / "model.safetensors").write_bytes(b"\xff" * 64)
        self.refuse_model(model, 4, "corrupt")

    def test_damaged_safetensors(self):
        model = self.exported()
        file = model / "model.safetensors"
        whole = file.read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        header = json.loads(whole[8:8 + length])
        data = whole[8 + length:]

        def changed(**tensors):
            text = json.dumps({**header, **tensors}).encode()
            return struct.pack("<Q", len(text)) + text + data

        first, second = list(header)[1:3]
        begin, end = header[second]["data_offsets"]
        cases = {"cut at its end": whole[:-1], "cut in its header": whole[:100], "empty": b"", "too long": whole + b"x",
                 "a header of 2^60 bytes": struct.pack("<Q", 1 << 60) + whole[8:],
                 "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + whole[8:],
                 "overlap": changed(**{second: {**header[second], "data_offsets": [begin - 4, end - 4]}}),
                 "outside": changed(**{second: {**header[second], "data_offsets": [begin, end + (1 << 40)]}}),
                 "backwards": changed(**{second: {**header[second], "data_offsets": [end, begin]}}),
                 "another size": changed(**{second: {**header[second], "shape": [1 << 62, 1 << 62]}}),
                 "unknown type": changed(**{first: {**header[first], "dtype": "F4"}}),
                 "nested": struct.pack("<Q", 200000) + b"[" * 100000 + b"]" * 100000}
        words = {"cut in its header": "and has 100 in all", "empty": "shorter", "too long": "longer than its tensors, by 1 B",
                 "overlap": "overlaps another", "outside": "outside the file", "a header of 2^60 bytes": str(1 << 60)}
        for bit in (3, 70, 8 * 8 + 1, 8 * 300 + 6):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << (bit % 8)
            cases[f"bit {bit} flipped"] = bytes(flipped)
        for name, content in cases.items():
            with self.subTest(name):
                file.write_bytes(content)
                self.refuse_model(model, 4, "model.safetensors", *([words[name]] if name in words else []))

    def test_weights_that_are_not_finite_are_named(self):
        model = self.exported()
        file = model / "model.safetensors"
        whole = bytearray(file.read_bytes())
        whole[-4:] = struct.pack("<f", float("nan"))
        file.write_bytes(whole)
        result = self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "1"))
        self.assertIn("head.norm.bias: 1 of 192 values are NaN or infinite", result.stderr)

    def test_gpt2_with_and_without_its_prefix(self):
        model = self.exported()
        file = model / "model.safetensors"
        whole = file.read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        evaluate = ["eval", "--model", model, "--data", self.held_out(), "--seq-len", "32", "--threads", "1", "--json"]
        expected = json.loads(self.succeed(self.run_program(*evaluate)).stdout)["loss"]
        header = {name.removeprefix("transformer."): value
                  for name, value in json.loads(whole[8:8 + length]).items()}
        self.assertIn("wte.weight", header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length:])
        self.assertEqual(json.loads(self.succeed(self.run_program(*evaluate)).stdout)["loss"], expected)

    def test_descriptions_that_contradict(self):
        model = self.exported()
        config = json.loads((model / "config.json").read_text())
        for changes, code, words in [
                ({"architectures": ["Gemma2ForCausalLM"]}, 2, ["GemmaForCausalLM", "; use one of", "GPT2LMHeadModel", "Qwen3ForCausalLM"]),
                ({"activation_function": "relu"}, 2, ["activation_function"]), ({"n_embd": -4}, 2, ["width"]),
                ({"n_layer": 1 << 40}, 2, ["layers"]), ({"n_layer": 1 << 64}, 2, ["n_layer"]),
                ({"n_layer": "four"}, 2, ["n_layer"]), ({"n_layer": 5}, 4, ["missing"]), ({"n_layer": 3}, 4, ["unexpected"]),
                ({"vocab_size": 300}, 4, ["misshapen"]), ({"eos_token_id": "end"}, 2, ["eos_token_id"])]:
            with self.subTest(changes):
                (model / "config.json").write_text(json.dumps({**config, **changes}))
                self.refuse_model(model, code, *words)
        deep = json.dumps(config)[:-1] + ', "n_layer": ' + "[" * 200000 + "]" * 200000 + "}"
        (model / "config.json").write_text(deep)
        self.refuse_model(model, 2, "nested too deep")

    def test_shards(self):
        out, model = self.root / "run", self.root / "sharded"
        self.succeed(self.train("--steps", "1", "--out", out))
        self.succeed(self.run_program("export", out, "--to", model, "--shard-size", "1MiB"))
        index = model / "model.safetensors.index.json"
        shards = sorted(model.glob("model-*.safetensors"))
        self.assertGreater(len(shards), 2)
        listing = json.loads(index.read_text())
        self.assertEqual(set(listing["weight_map"].values()), {s.name for s in shards})
        self.succeed(self.run_program("train", "--model", model, "--data", self.text, *SMALL, "--steps", "1"))
        for wrong, words in [({"weight_map": {"a": "../x.safetensors"}}, ["index"]), ({"weight_map": 3}, ["weight_map"]),
                             ({"weight_map": {"a": "none.safetensors"}}, ["none.safetensors"])]:
            index.write_text(json.dumps(wrong))
            self.refuse_model(model, 4, *words)
        index.write_text(json.dumps(listing))
        shards[1].unlink()
        self.refuse_model(model, 4, shards[1].name)

    def loss_of(self, model):
        return json.loads(self.succeed(self.run_program("eval", "--model", model, "--data", self.held_out(), "--seq-len",
                                                        "32", "--threads", "1", "--json")).stdout)["loss"]

    def test_one_file_beside_shards_is_taken_as_transformers_does(self):
        single, sharded = self.exported(), self.root / "sharded"
        self.succeed(self.train("--steps", "2", "--lr", "0.1", "--out", self.root / "other"))
        self.succeed(self.run_program("export", self.root / "other", "--to", sharded, "--shard-size", "1MiB"))
        before = self.loss_of(sharded)
        (sharded / "model.safetensors").write_bytes((single / "model.safetensors").read_bytes())
        self.assertEqual(self.loss_of(sharded), self.loss_of(single))
        self.assertNotEqual(self.loss_of(sharded), before)

    def test_a_tied_head_is_the_embedding_or_refused(self):
        model = self.exported()
        file = model / "model.safetensors"
        whole = file.read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        header, data = json.loads(whole[8:8 + length]), whole[8 + length:]
        embedding = header["transformer.wte.weight"]
        begin, end = embedding["data_offsets"]

        def with_head(head, **changes):
            entry = {**embedding, **changes, "data_offsets": [len(data), len(data) + len(head)]}
            text = json.dumps({**header, "lm_head.weight": entry}).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + data + head)
        loss = self.loss_of(model)
        with_head(data[begin:end])
        self.assertEqual(self.loss_of(model), loss)
        words = ["lm_head.weight differs", "transformer.wte.weight", '"tie_word_embeddings" to false']
        with_head(data[begin:end - 1] + bytes([data[end - 1] ^ 1]))
        self.refuse_model(model, 4, *words)
        with_head(data[begin:end], shape=embedding["shape"][::-1])
        self.refuse_model(model, 4, *words)
        with_head(data[begin:end][::2], dtype="BF16")
        self.refuse_model(model, 4, *words)

    def test_export_takes_no_folder_that_is_not_empty(self):
        out = self.root / "run"
        self.succeed(self.train("--steps", "1", "--out", out))
        self.refused(self.run_program("export", out, "--to", out), 7, "empty")
        self.refused(self.run_program("export", out, "--to", self.root / "x", "--shard-size", "0"), 2, "--shard-size")
        self.refused(self.run_program("export", "tiny-gpt2", "--to", self.root / "x"), 2, "no weights")
        (self.root / "there").mkdir()
        self.succeed(self.run_program("export", out, "--to", str(self.root / "there") + "/"))
        self.assertEqual({p.name for p in (self.root / "there").iterdir()},
                         {"config.json", "generation_config.json", "model.safetensors"})


class Plans(ProgramTest):
    def test_ceiling_that_cannot_fit_and_advice_that_works(self):
        out = self.root / "out"
        result = self.train("--steps", "1", "--out", out, "--device-memory", "2MiB")
        self.assertFalse(out.exists())
        line = self.refused(result, 3, "2.0 MiB")
        self.assertIn("total", result.stderr)
        advice = line.split("; try ")[1]
        self.assertTrue(advice.startswith("--device-memory "), advice)
        ceiling = advice.split()[1].rstrip(",")
        self.succeed(self.train("--steps", "1", "--out", out, "--device-memory", ceiling))
        if ", or " in advice:
            flags = advice.split(", or ")[1].split(" (")[0].split()
            self.succeed(self.train("--steps", "1", "--out", self.root / "second", *flags,
                                    *([] if "--device-memory" in flags else ["--device-memory", "2MiB"])))

    def test_host_ceiling(self):
        result = self.train("--steps", "1", "--policy", "host", "--host-memory", "4MiB")
        self.refused(result, 3, "host")

    def test_plan_as_json_says_that_it_does_not_fit(self):
        result = self.run_program("plan", "--model", "tiny-gpt2", "--device-memory", "1MiB", "--json")
        self.refused(result, 3)
        said = json.loads(result.stdout)
        self.assertFalse(said["fits"])
        self.assertEqual([said["model"], said["activations"]], ["tiny-gpt2", None])
        # Memory that it would need, as in the table that is shown with the refusal.
        entries = {(e["name"], e["where"]): e["bytes"] for e in said["entries"]}
        self.assertEqual(said["device_bytes"], sum(b for (_, where), b in entries.items() if where == "device"))
        self.assertEqual(said["host_bytes"], sum(b for (_, where), b in entries.items() if where != "device"))
        self.assertIn(("reserved by the caller", "device"), entries)
        (total,) = [line.split() for line in result.stderr.splitlines() if line.startswith("total")]
        self.assertEqual(total[1], f"{said['device_bytes'] / 2**20:.1f}")
        fitting = self.succeed(self.run_program("plan", "--model", "tiny-gpt2", "--device", "host", "--json"))
        self.assertEqual(set(said), set(json.loads(fitting.stdout)))


if __name__ == "__main__":
    main()
