#!/usr/bin/env python3
"""The program on a CUDA device, from outside: what a user types and what comes back. The device is a fake.

Usage: program_test.py PROGRAM FOLDER_OF_THE_FAKE_NCCL
"""
import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROGRAM, NCCL = (Path(sys.argv.pop(1)).resolve() for _ in range(2))
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256,
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"]}
MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
         "architectures": ["LlamaForCausalLM"]}


class OnAFakeGpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tandem_cuda_")
        self.addCleanup(folder.cleanup)
        self.work = Path(folder.name)
        (self.work / "config.json").write_text(json.dumps(MODEL))
        (self.work / "text.txt").write_text("".join(f"{i} bottles on the wall, " for i in range(200)))
        # Windows enough for several micro-batches: emulated, a whole text takes long.
        (self.work / "held-out.txt").write_text("".join(f"{i} bottles on the wall, " for i in range(5)))

    def run_program(self, *arguments, fake="none"):
        # Guarded: whoever but a stream touches device memory ends the program.
        environment = {**os.environ, "TANDEM_FAKE_CUDA": fake, "TANDEM_FAKE_GUARD": "1"}
        return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False,
                              env=environment, timeout=300)

    def train(self, out, *arguments, fake="none"):
        model = () if "--model" in arguments else ("--model", self.work / "config.json")
        return self.run_program("train", *model, "--data", self.work / "text.txt", "--out", self.work / out, "--seq-len", 16,
                                "--steps", 4, "--checkpoint-every", 2, "--update-threads", 1, *arguments, fake=fake)

    def summary(self, out):
        return json.loads((self.work / out / "summary.json").read_text())

    def test_every_policy_gives_one_digest_and_books_what_it_takes(self):
        digests = set()
        recompute = ("none", "block:1,selective", "selective", "auto")
        for policy, kept in zip(("device", "host", "interleave:2,resident=0.4", "stream"), recompute):
            done = self.train(policy.replace(",", "-"), "--device", "cuda", "--policy", policy, "--recompute", kept)
            self.assertEqual(done.returncode, 0, done.stderr)
            summary = self.summary(policy.replace(",", "-"))
            self.assertEqual(summary["device"], "cuda:0 Fake GPU")
            self.assertIn("; attention plain", summary["compute_key"])
            self.assertRegex(done.stderr, r"tandem: warning: attention runs in plain kernels, which are slower: [^\n]+\n")
            self.assertEqual(summary["planned_device_bytes"], summary["peak_device_bytes"])
            digests.add(summary["state_digest"])
        self.assertEqual(len(digests), 1)

    def test_all_that_a_run_does_touches_device_memory_by_streams_and_changes_no_bit(self):
        qwen3 = {**MODEL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16,
                 "tie_word_embeddings": True}
        # Flags that decide about the bits, and flags of how they are computed.
        ways = {"grown": (["--grad-accum", 2],
                          ["--state", "split", "--eval-data", self.work / "held-out.txt", "--eval-every", 2, "--recompute",
                           "selective"]),
                "lean": (["--state", "bf16-moments"],
                         ["--recompute", "block", "--offload-activations", "--resident-layers", 0]),
                "leanest": (["--state", "8bit-moments"], ["--policy", "interleave:2,resident=0.3"]),
                "frozen": (["--freeze", "embed|wte", "--clip", 0],
                           ["--on-nonfinite", "stop", "--trace", self.work / "t.json"])}
        for name, model in {"llama": MODEL, "gpt2": GPT2, "qwen3": qwen3}.items():
            (self.work / f"{name}.json").write_text(json.dumps(model))
            digests = set()
            for way, (work, manner) in ways.items():
                runs = {way: ("--policy", "interleave:2", *manner), f"{way}-plainly": ("--policy", "device")}
                for out, flags in runs.items():
                    done = self.train(f"{name}-{out}", "--device", "cuda", *work, *flags,
                                      "--model", self.work / f"{name}.json")
                    self.assertEqual(done.returncode, 0, f"{name}-{out}: {done.stderr}")
                of_way, plainly = (self.summary(f"{name}-{out}")["state_digest"] for out in runs)
                self.assertRegex(of_way, "^[0-9a-f]{32}$")
                self.assertEqual(of_way, plainly, f"{name}-{way}")
                digests.add(of_way)
            self.assertEqual(len(digests), len(ways), name)
            run = self.work / f"{name}-grown"
            for command in (("eval", "--data", self.work / "held-out.txt", "--seq-len", 16),
                            ("sample", "--prompt", "bottles", "--max-tokens", 5)):
                done = self.run_program(*command, "--model", run, "--device", "cuda")
                self.assertEqual(done.returncode, 0, f"{name}: {command[0]}: {done.stderr}")
            done = self.run_program("export", run, "--to", self.work / f"{name}-exported")
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_experts_have_one_digest_wherever_they_are_kept(self):
        experts = {**MODEL, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16,
                   "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
        (self.work / "config.json").write_text(json.dumps(experts))
        digests = set()
        for out, manner in {"plainly": ["--policy", "device"],
                            "lean": ["--policy", "stream", "--recompute", "block", "--resident-layers", 0],
                            "grown": ["--policy", "interleave:2", "--recompute", "selective", "--state", "split"]}.items():
            done = self.train(out, "--device", "cuda", *manner)
            self.assertEqual(done.returncode, 0, done.stderr)
            digests.add(self.summary(out)["state_digest"])
        self.assertEqual(len(digests), 1)

    def test_two_gpus_train_to_the_digest_of_one(self):
        work = ["--grad-accum", 4, "--eval-data", self.work / "held-out.txt", "--eval-every", 2, "--keep", 0]
        one = self.train("one", "--device", "cuda:1", "--policy", "interleave:2", *work, fake="cards 2")
        self.assertEqual(one.returncode, 0, one.stderr)
        expected = self.summary("one")
        for out, fake, manner in (
            ("device", "cards 2", ["--policy", "device"]),
            ("interleaved", "cards 2", ["--policy", "interleave:2,resident=0.4", "--recompute", "block"]),
            ("apart", "cards 2 apart 1", ["--policy", "stream", "--resident-layers", 0]),
        ):
            done = self.train(out, "--device", "cuda:0,cuda:1", *manner, *work, fake=fake)
            self.assertEqual(done.returncode, 0, done.stderr)
            summary = self.summary(out)
            for key in ("state_digest", "compute_key", "final_loss", "eval_loss"):
                self.assertEqual(summary[key], expected[key], f"{out}: {key}")
            self.assertEqual((summary["ranks"], summary["device"]), (2, "cuda:0 Fake GPU, cuda:1 Fake GPU"))
            self.assertEqual(summary["planned_device_bytes"], summary["peak_device_bytes"], out)
            self.assertGreater(summary["bytes"]["peers"], 0)
        for out, checkpoint, device in (("grown", "one", "cuda:1,cuda:0"), ("shrunk", "interleaved", "cuda:0")):
            checkpoint = self.work / checkpoint / "checkpoints/step-00000002"
            done = self.train(out, "--device", device, "--resume", checkpoint, "--policy", "host", *work, fake="cards 2")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.summary(out)["resumed_from_step"], 2)
            self.assertEqual(self.summary(out)["state_digest"], expected["state_digest"], out)

    def test_where_one_of_two_gpus_is_lost_the_run_ends_with_one_line(self):
        two = ("--device", "cuda:0,cuda:1", "--grad-accum", 2)
        whole = self.train("whole", *two, fake="cards 2")
        self.assertEqual(whole.returncode, 0, whole.stderr)
        for launches in (int(200 * 1.3**i) for i in range(40)):
            out = f"lost-{launches}"
            checkpoint = self.work / out / "checkpoints/step-00000002"
            lost = self.train(out, *two, fake=f"cards 2 launch {launches}")
            self.assertEqual(lost.returncode, 5, lost.stderr)
            errors = [line for line in lost.stderr.splitlines() if line.startswith("tandem: error:")]
            self.assertEqual(len(errors), 1, lost.stderr)
            self.assertRegex(errors[0], "launch|device lost")
            self.assertNotRegex(errors[0], "rank [01]")  # the failure itself, and not word of it from another rank
            if checkpoint.exists():
                break
        resumed = self.train(out, *two, "--resume", fake="cards 2")
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        self.assertEqual(self.summary(out)["state_digest"], self.summary("whole")["state_digest"])

    def test_memory_that_cannot_be_pinned_stays_pageable_or_is_refused(self):
        whole = self.train("whole", "--device", "cuda")
        self.assertEqual(whole.returncode, 0, whole.stderr)
        done = self.train("pageable", "--device", "cuda", fake="pin 0")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"tandem: warning: cannot pin .*: it stays pageable")
        self.assertEqual(self.summary("pageable")["state_digest"], self.summary("whole")["state_digest"])
        refused = self.train("strict", "--device", "cuda", "--strict", fake="pin 0")
        self.assertEqual(refused.returncode, 5, refused.stderr)
        self.assertRegex(refused.stderr, r"tandem: error: cannot pin ")

    def test_a_device_lost_in_mid_step_ends_with_one_line_and_the_last_checkpoint_goes_on(self):
        whole = self.train("whole", "--device", "cuda")
        self.assertEqual(whole.returncode, 0, whole.stderr)
        # Later and later, until it is lost between the first checkpoint and the end.
        for launches in (int(100 * 1.3**i) for i in range(40)):
            out = f"lost-{launches}"
            checkpoint = self.work / out / "checkpoints/step-00000002"
            lost = self.train(out, "--device", "cuda", fake=f"launch {launches}")
            self.assertEqual(lost.returncode, 5, lost.stderr)
            if checkpoint.exists():
                break
        errors = [line for line in lost.stderr.splitlines() if line.startswith("tandem: error:")]
        self.assertEqual(len(errors), 1, lost.stderr)
        self.assertRegex(errors[0], "launch|device lost")
        self.assertEqual(self.run_program("digest", checkpoint).returncode, 0)
        resumed = self.train(out, "--device", "cuda", "--resume")
        self.assertEqual(resumed.returncode, 0, resumed.stderr)
        self.assertEqual(self.summary(out)["state_digest"], self.summary("whole")["state_digest"])

    def test_an_old_driver_is_said_and_the_host_device_taken(self):
        plan = ("plan", "--model", self.work / "config.json", "--seq-len", 16, "--device-memory", "64MiB")
        auto = self.run_program(*plan, fake="driver 12020")
        self.assertEqual(auto.returncode, 0, auto.stderr)
        self.assertIn("supports CUDA 12.2, this build needs 13.0", auto.stderr)
        cuda = self.run_program(*plan, "--device", "cuda", fake="driver 12020")
        self.assertEqual(cuda.returncode, 5)
        self.assertEqual(len(cuda.stderr.splitlines()), 1, cuda.stderr)

    def test_wrong_devices(self):
        plan = ("plan", "--model", self.work / "config.json", "--seq-len", 16)
        for arguments, code, text in (
            (("--device", "cuda:7"), 5, "there is one GPU, cuda:0"),
            (("--device", "cuda:0,cuda:1", "--grad-accum", 2), 5, "there is one GPU, cuda:0"),
            (("--device", "cuda:0,host", "--grad-accum", 2), 2, "several are GPUs by their numbers"),
            (("--device", "cuda", "--device-memory", "4GiB"), 3, "of 1.00 GiB are free"),
            (("--device", "cuda", "--device-memory", "8MiB"), 3, "context and libraries alone take"),
            (("--device", "cuda:x"), 2, "cuda:x"),
            (("--device", "cuda", "--compute", "fp32"), 2, "on a GPU"),
            (("--device", "cuda", "--link-bandwidth", "1GB/s"), 2, "only the host device emulates"),
            (("--device", "auto", "--update-rate", "1M"), 2, "only the host device emulates"),
        ):
            refused = self.run_program(*plan, *arguments)
            self.assertEqual(refused.returncode, code, refused.stderr)
            self.assertIn(text, refused.stderr)
            self.assertEqual(len(refused.stderr.splitlines()), 1, refused.stderr)

    def test_gpus_of_different_kinds_are_refused(self):
        refused = self.train("unlike", "--device", "cuda:0,cuda:1", "--grad-accum", 2, fake="older 1")
        self.assertEqual(refused.returncode, 2, refused.stderr)
        self.assertRegex(refused.stderr, r"devices cuda:0 Fake GPU and cuda:1 Older GPU: .* different kinds")
        self.assertFalse((self.work / "unlike").exists())

    def processes(self, out, *arguments, count=2, **changes):
        """Ends of a launch, a GPU for each process."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = []
        for rank in range(count):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": port, "TANDEM_TOKEN": "a secret", "TANDEM_FAKE_CUDA": f"cards {count}", "LD_LIBRARY_PATH": NCCL, **changes}
            started.append(subprocess.Popen(
                [PROGRAM, "train", "--model", self.work / "config.json", "--data", self.work / "text.txt", "--out", self.work / out,
                 "--seq-len", "16", "--steps", "4", "--checkpoint-every", "2", "--update-threads", "1", *map(str, arguments)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **{k: str(v) for k, v in place.items()}}))
        return [(process.returncode, err) for process, (_, err) in [(p, p.communicate(timeout=300)) for p in started]]

    def test_gpus_of_several_processes_train_to_the_bits_of_one(self):
        work = ("--grad-accum", 2, "--device", "cuda")
        one = self.train("one", *work, "--policy", "interleave:2")
        self.assertEqual(one.returncode, 0, one.stderr)
        for policy in ("host", "interleave:2"):
            ends = self.processes(f"two {policy}", *work, "--policy", policy)
            self.assertEqual([code for code, _ in ends], [0, 0], ends)
            summary = self.summary(f"two {policy}")
            self.assertEqual(summary["state_digest"], self.summary("one")["state_digest"])
            self.assertEqual(summary["device"], "cuda:0 Fake GPU, cuda:1 Fake GPU")
            self.assertGreater(summary["planned_device_bytes"], self.summary("one")["planned_device_bytes"] + (300 << 20))
        ends = self.processes("without", *work, TANDEM_FAKE_NCCL_VERSION="21805")
        self.assertEqual([code for code, _ in ends], [5, 5], ends)
        self.assertIn("2.18.5", ends[0][1])

    def test_context_and_libraries_are_a_row_of_the_plan(self):
        done = self.run_program("plan", "--model", self.work / "config.json", "--seq-len", 16, "--device", "cuda", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = {e["name"]: e for e in json.loads(done.stdout)["entries"]}
        self.assertEqual(rows["device context and libraries"]["where"], "device")
        self.assertGreater(rows["device context and libraries"]["bytes"], 1 << 20)


if __name__ == "__main__":
    unittest.main()
