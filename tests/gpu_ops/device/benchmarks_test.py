#!/usr/bin/env python3
"""The benchmarks of a GPU, on a fake one and with tiny shapes: that they run, and that their figures are what they say.

Usage: benchmarks_test.py FOLDER TANDEM BENCH_GPU
"""
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

FOLDER, TANDEM, BENCH_GPU = (Path(word).resolve() for word in sys.argv[1:4])
del sys.argv[1:4]
sys.path.insert(0, str(FOLDER))

# The program, noting what it is asked; where FAILS says so it is a stand-in that fails, or that finds no room. It measures
# the machine once: no test asks for what was found, and another would find it again.
WRAPPER = """#!/bin/bash
echo "$*" >> "$LOG"
if [ "$1" = calibrate ]; then
  if [ ! -d "$MEASURED/tandem" ]; then XDG_CACHE_HOME=$MEASURED {tandem} "$@" || exit; fi
  mkdir -p "$XDG_CACHE_HOME" && exec cp -r "$MEASURED/tandem" "$XDG_CACHE_HOME"
fi
case " $* " in
  *" bench "*" --policies ${{FAILS:-none}} "* | *" bench "*"${{FAILS:-none}}.json "*)
    echo "tandem: cuda:0: device lost: injected" >&2; exit 5 ;;
  *" bench "*" --policies ${{NO_ROOM:-none}} "*)
    echo '{{"policies": [{{"policy": "x", "fits": false, "why": "46.30 GiB are needed"}}]}}'; exit 3 ;;
esac
exec {tandem} "$@"
"""
# Has no room for two sequences; compiled it never ends.
PEER = """#!/bin/bash
case "$*" in
  -c*) exit 0 ;;
  *--compile*) sleep 60 ;;
  *"--batch 2"*) echo "torch.OutOfMemoryError: CUDA out of memory" >&2; exit 1 ;;
esac
echo "words of theirs"
echo '{"step_seconds": [9, 9, 9, 0.25], "device_bytes": 0}'
"""


class OnAFakeGpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        measured = tempfile.TemporaryDirectory(prefix="tandem_gpu_measured_")
        cls.addClassCleanup(measured.cleanup)
        cls.measured = measured.name

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tandem_gpu_benchmarks_")
        self.addCleanup(folder.cleanup)
        self.programs = Path(folder.name)
        self.log = self.programs / "log"
        self.script("tandem", WRAPPER.format(tandem=TANDEM))
        (self.programs / "bench_gpu").symlink_to(BENCH_GPU)

    def script(self, name, text):
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)
        return self.programs / name

    def run_benchmark(self, name, folder=FOLDER, **environment):
        environment = {**os.environ, "TANDEM_BENCH_PROGRAMS": str(self.programs), "TANDEM_BENCH_SMALL": "1",
                       "TANDEM_BENCH_PYTHON": "/nowhere/python", "LOG": str(self.log), "MEASURED": self.measured,
                       **environment}
        return subprocess.run([sys.executable, folder / "run.py", name], capture_output=True, text=True, check=False,
                              env=environment, timeout=600)

    def asked(self, command):
        return [line for line in self.log.read_text().splitlines() if line.startswith(command + " ")]

    def figures(self, name):
        done = self.run_benchmark(name)
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        self.assertEqual(result["name"], name)
        self.assertEqual(result["gpu"], "cuda:0 Fake GPU")
        for figure, value in result["figures"].items():
            self.assertTrue(math.isfinite(value) and value >= 0, f"{figure} is {value}")
        return result, done.stderr

    def test_kernels_stand_beside_the_copy(self):
        result, _ = self.figures("gpu-kernels")
        figures = result["figures"]
        over_copy = {name: value for name, value in figures.items() if name.startswith("kernel_")}
        for kernel in ("adamw_fp32", "adamw_split", "adamw_bf16_moments", "adamw_8bit_moments", "accumulate", "round",
                       "norm_blocks", "rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "swiglu", "swiglu_backward", "gelu",
                       "gelu_backward", "rope", "add", "weights_of_master", "expert_swiglu", "expert_swiglu_backward", "sum_rows",
                       "preference_loss"):
            self.assertIn(f"kernel_{kernel}_over_copy", over_copy)
        self.assertEqual(figures["worst_kernel_over_copy"], min(over_copy.values()))
        self.assertEqual(figures["product_forward_square_over_square"], 1.0)
        for name in ("product_backward_weight_odd", "attention_backward_grouped", "head_loss_small",
                     "experts_forward_small", "experts_backward_input_small", "experts_backward_weight_small"):
            self.assertGreater(figures[f"{name}_flop_per_second"], 0)

    def test_training_stands_beside_the_product(self):
        result, said = self.figures("gpu-training")
        figures = result["figures"]
        flops_of_a_token = {"gpt2_xl": 6 * (12 * 2 * 16**2 + 128 * 16) + 6 * 2 * 16 * 16,
                            "llama_7b": 6 * (2 * (4 * 16**2 + 3 * 16 * 24) + 128 * 16) + 6 * 2 * 16 * 16}
        for name, flops in flops_of_a_token.items():
            setting = result["settings"][name]
            self.assertEqual(setting["state"], "fp32")
            rates = {int(m) * 16 / seconds: seconds for m, seconds in setting["step_seconds"].items()}
            self.assertEqual(list(setting["step_seconds"]), ["2", "1"])
            self.assertEqual(setting["micro_batch"] * 16 / setting["step_seconds"][str(setting["micro_batch"])], max(rates))
            self.assertGreater(figures[f"{name}_predicted_over_measured"], 0)
            self.assertAlmostEqual(figures[f"{name}_tokens_per_second"] / max(rates), 1.0, places=4)
            self.assertAlmostEqual(figures[f"{name}_step_seconds"] / rates[max(rates)], 1.0, places=4)
            self.assertAlmostEqual(
                figures[f"{name}_over_product"] * figures["product_flop_per_second"] / (max(rates) * flops), 1.0, places=4)
        self.assertIn("/nowhere/python has no torch for the GPU and numpy: left out", said)
        self.assertEqual(len(self.asked("plan")), 2 * 3, "few plans are asked for: with large models each takes seconds")
        self.assertNotIn("measuring forward and backward", said, "the model is loaded once")

    def test_policies_have_one_digest(self):
        result, said = self.figures("gpu-policies")
        for name in ("gpt2_xl", "llama_7b"):
            self.assertEqual(result["settings"][name]["policies"], ["host", "static:0.9", "interleave:2", "stream", "auto"])
            self.assertEqual(result["figures"][f"{name}_different_digests"], 1)
            self.assertRegex(result["settings"][name]["state_digest"], "^[0-9a-f]{32}$")
            self.assertIn(f"{name}_interleave_2_exposed_update_seconds", result["figures"])
        self.assertIn("torch for the GPU and deepspeed: left out", said)
        self.assertEqual(said.count("measuring forward and backward"), 2, "once for each shape")

    def test_what_fails_costs_no_other_figure(self):
        done = self.run_benchmark("gpu-policies", TANDEM_BENCH_SHAPES="gpt2_xl", FAILS="stream", NO_ROOM="interleave:2")
        self.assertEqual(done.returncode, 1, done.stderr)
        result = json.loads(done.stdout)
        setting = result["settings"]["gpt2_xl"]
        self.assertEqual(setting["policies"], ["host", "static:0.9", "auto"])
        self.assertRegex(setting["failed"], "^stream: .*tandem failed: tandem: cuda:0: device lost: injected$")
        self.assertEqual(setting["does_not_fit"], {"interleave:2": "46.30 GiB are needed"})
        self.assertIn("gpt2_xl_auto_over_best", result["figures"])
        self.assertIn("bench: gpt2_xl: stream: ", done.stderr)
        done = self.run_benchmark("gpu-training", FAILS="llama_7b")
        self.assertEqual(done.returncode, 1, done.stderr)
        result = json.loads(done.stdout)
        self.assertRegex(result["settings"]["llama_7b"]["failed"], "^micro-batch 2: .*injected; micro-batch 1: .*injected$")
        self.assertIn("gpt2_xl_over_product", result["figures"])
        self.assertNotIn("llama_7b_over_product", result["figures"])

    def test_what_does_not_fit_is_no_failure(self):
        done = self.run_benchmark("gpu-policies", TANDEM_BENCH_SHAPES="gpt2_xl", NO_ROOM="static:0.9",
                                  TANDEM_BENCH_POLICIES="host static:0.9")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_peers_that_fail_or_hang_cost_nothing_else(self):
        peer = {"TANDEM_BENCH_PYTHON": str(self.script("python", PEER)), "TANDEM_BENCH_PEER_SECONDS": "2",
                "TANDEM_BENCH_SHAPES": "gpt2_xl"}
        done = self.run_benchmark("gpu-training", **peer)
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        settings = result["settings"]
        self.assertEqual(settings["torch_eager"]["micro_batch"], 1)
        self.assertRegex(settings["torch_eager"]["failed"], "^micro-batch 2: .* failed: torch.OutOfMemoryError: [a-zA-Z ]+$")
        self.assertRegex(settings["torch_compiled"]["failed"], "^micro-batch 2: .* had not ended after 2 seconds$")
        best = settings["gpt2_xl"]["micro_batch"]
        of_a_sequence = settings["gpt2_xl"]["step_seconds"][str(best)] / best
        self.assertAlmostEqual(result["figures"]["torch_eager_over_ours"] * of_a_sequence / 0.25, 1.0, places=4)
        done = self.run_benchmark("gpu-policies", **peer, TANDEM_BENCH_POLICIES="host")
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        self.assertRegex(result["settings"]["deepspeed"]["failed"], "out of memory")
        self.assertIn("gpt2_xl_host_step_seconds", result["figures"])

    def test_a_copy_of_unknown_commit_measures_too(self):
        shutil.copytree(FOLDER, self.programs / "elsewhere" / "bench")
        done = self.run_benchmark("gpu-policies", self.programs / "elsewhere" / "bench", TANDEM_BENCH_SHAPES="gpt2_xl",
                                  TANDEM_BENCH_POLICIES="host", GIT_CEILING_DIRECTORIES=str(self.programs))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIsNone(json.loads(done.stdout)["commit"])

    def test_a_part_can_be_chosen(self):
        done = self.run_benchmark("gpu-policies", TANDEM_BENCH_SHAPES="gpt2_xl", TANDEM_BENCH_POLICIES="auto host")
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        self.assertEqual({name: setting["policies"] for name, setting in result["settings"].items()},
                         {"gpt2_xl": ["host", "auto"]})
        self.assertEqual(result["command"],
                         "TANDEM_BENCH_SHAPES=gpt2_xl TANDEM_BENCH_POLICIES='auto host' bench/run.py gpu-policies")
        done = self.run_benchmark("gpu-training", TANDEM_BENCH_SHAPES="gpt3")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr.splitlines()[-1], "^bench: TANDEM_BENCH_SHAPES: gpt3 is none of llama_7b gpt2_xl$")
        done = self.run_benchmark("gpu-training", TANDEM_BENCH_SHAPES="gpt2_xl", TANDEM_BENCH_MICRO_BATCH="1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(list(json.loads(done.stdout)["settings"]["gpt2_xl"]["step_seconds"]), ["1"])
        self.assertNotIn("gpt2_xl_8bit_moments", json.loads(done.stdout)["settings"], "fp32 fits")
        self.assertNotIn("--micro-batch 2", done.stderr)
        done = self.run_benchmark("gpu-training", TANDEM_BENCH_MICRO_BATCH="0")
        self.assertRegex(done.stderr.splitlines()[-1], "^bench: TANDEM_BENCH_MICRO_BATCH: 0 is less than the least of llama_7b, 1$")
        done = self.run_benchmark("gpu-policies", TANDEM_BENCH_SHAPES="gpt2_xl", TANDEM_BENCH_POLICIES="host", TANDEM_BENCH_STEPS="2")
        self.assertIn("--steps 2 ", self.asked("bench")[-1])
        self.assertIn("TANDEM_BENCH_STEPS=2 ", json.loads(done.stdout)["command"])
        done = self.run_benchmark("gpu-policies", TANDEM_BENCH_STEPS="0")
        self.assertEqual(done.stderr.splitlines()[-1], "bench: TANDEM_BENCH_STEPS: 0 is no number of steps")

    def test_what_was_measured_before_the_end_is_kept(self):
        def figures_of_a_run():
            done = self.run_benchmark("gpu-policies", TANDEM_BENCH_SHAPES="gpt2_xl", TANDEM_BENCH_POLICIES="stream host",
                                      TANDEM_BENCH_WORK=str(self.programs / "work"))
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["figures"], done.stderr

        first, said = figures_of_a_run()
        self.assertIn("measuring forward and backward", said)
        kept = self.programs.glob("work/rows-*/rows.jsonl")
        (rows,) = [file for file in kept if '"policies":["stream"]' in file.read_text()]
        whole = rows.read_text().splitlines(keepends=True)
        shutil.rmtree(rows.parent)
        second, said = figures_of_a_run()
        self.assertNotIn("measuring forward and backward", said, "nor is that measured again")
        self.assertEqual(first["gpt2_xl_host_step_seconds"], second["gpt2_xl_host_step_seconds"], "the first row is kept")
        self.assertNotEqual(first["gpt2_xl_stream_step_seconds"], second["gpt2_xl_stream_step_seconds"], "the last is not")
        self.assertEqual(len(rows.read_text().splitlines()), len(whole))

    def test_a_machine_without_a_gpu_is_one_line(self):
        (self.programs / "bench_gpu").unlink()
        (self.programs / "bench_gpu").write_text("#!/bin/sh\necho 'bench_gpu: no NVIDIA driver is installed' >&2\nexit 5\n")
        (self.programs / "bench_gpu").chmod(0o755)
        done = self.run_benchmark("gpu-kernels")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout, "")
        self.assertIn("no NVIDIA driver is installed", done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], r"^bench: .*bench_gpu failed$")


class OfEightyGigabytes:
    """A device on which a 7B model has room with moments of 16 bits and fewer."""
    sequence_seconds = {8: 1.3, 4: 1.0, 2: 1.2, 1: 1.5}
    largest = {"bf16-moments": 4, "8bit-moments": 8}

    def state_of(self, shape, *flags):
        return "bf16-moments"

    def run_of(self, shape, micro_batch, state, *flags):
        return micro_batch, state

    def plan(self, micro_batch, state):
        fits = micro_batch <= self.largest[state]
        return {"predicted": {"step_seconds": self.sequence_seconds[micro_batch] * micro_batch}} if fits else None


class Choices(unittest.TestCase):
    def test_where_moments_are_rounded_the_smallest_format_is_measured_too(self):
        import gpu
        import gpu_training
        device = OfEightyGigabytes()
        self.assertEqual(gpu_training.formats(device, gpu.LLAMA_7B), {"llama_7b": "bf16-moments",
                                                                      "llama_7b_8bit_moments": "8bit-moments"})
        device.state_of = lambda *words: "split"
        self.assertEqual(gpu_training.formats(device, gpu.LLAMA_7B), {"llama_7b": "split"})
        device.state_of = lambda *words: "8bit-moments"
        self.assertEqual(gpu_training.formats(device, gpu.LLAMA_7B), {"llama_7b": "8bit-moments"})
        device.state_of = lambda *words: None
        self.assertEqual(gpu_training.formats(device, gpu.LLAMA_7B), {})

    def test_a_run_is_spent_on_what_is_predicted_to_be_fastest_by_the_token(self):
        import gpu
        import gpu_training
        few = dataclasses.replace(gpu.LLAMA_7B, micro_batches=(8, 4, 2, 1))
        self.assertEqual(gpu_training.promising(OfEightyGigabytes(), few, "bf16-moments"), {4: 4.0, 2: 2.4})
        self.assertEqual(list(gpu_training.promising(OfEightyGigabytes(), few, "8bit-moments")), [4, 2])


class Arithmetic(unittest.TestCase):
    def test_weights_in_products_are_those_of_the_models(self):
        import gpu
        # GPT-2 XL has 1,557,611,200 weights: less positions, biases and norms. Llama 2 7B has 6,738,415,616: less its
        # embedding and norms.
        self.assertEqual(gpu.GPT2_XL.weights, 1_557_611_200 - 1024 * 1600 - (13 * 48 + 2) * 1600)
        self.assertEqual(gpu.LLAMA_7B.weights, 6_738_415_616 - 32000 * 4096 - (2 * 32 + 1) * 4096)
        self.assertEqual(gpu.GPT2_XL.flops(2), 2 * 1024 * (6 * gpu.GPT2_XL.weights + 6 * 48 * 1600 * 1024))


if __name__ == "__main__":
    unittest.main()
