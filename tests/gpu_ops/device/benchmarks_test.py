#!/usr/bin/env python3
"""The benchmarks of a GPU, on a fake one and with tiny shapes: that they run, and that their figures are what they say.

Usage: benchmarks_test.py FOLDER TANDEM BENCH_GPU
"""
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

FOLDER, TANDEM, BENCH_GPU = (Path(word).resolve() for word in sys.argv[1:4])
del sys.argv[1:4]
sys.path.insert(0, str(FOLDER))


class OnAFakeGpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tandem_gpu_benchmarks_")
        self.addCleanup(folder.cleanup)
        self.programs = Path(folder.name)
        (self.programs / "tandem").symlink_to(TANDEM)
        (self.programs / "bench_gpu").symlink_to(BENCH_GPU)

    def run_benchmark(self, name, **environment):
        environment = {**os.environ, "TANDEM_BENCH_PROGRAMS": str(self.programs), "TANDEM_BENCH_SMALL": "1",
                       "TANDEM_BENCH_PYTHON": "/nowhere/python", **environment}
        return subprocess.run([sys.executable, FOLDER / "run.py", name], capture_output=True, text=True, check=False,
                              env=environment, timeout=600)

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
        for kernel in ("adamw_fp32", "adamw_split", "adamw_bf16_moments", "accumulate", "round", "norm_blocks", "rms_norm",
                       "rms_norm_backward", "layer_norm", "layer_norm_backward", "swiglu", "swiglu_backward", "gelu",
                       "gelu_backward", "rope", "add", "weights_of_master"):
            self.assertIn(f"kernel_{kernel}_over_copy", over_copy)
        self.assertEqual(figures["worst_kernel_over_copy"], min(over_copy.values()))
        self.assertEqual(figures["product_forward_square_over_square"], 1.0)
        for name in ("product_backward_weight_odd", "attention_backward_grouped", "head_loss_small"):
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
            self.assertEqual(len(rates), 2)
            self.assertAlmostEqual(figures[f"{name}_tokens_per_second"] / max(rates), 1.0, places=4)
            self.assertAlmostEqual(figures[f"{name}_step_seconds"] / rates[max(rates)], 1.0, places=4)
            self.assertAlmostEqual(
                figures[f"{name}_over_product"] * figures["product_flop_per_second"] / (max(rates) * flops), 1.0, places=4)
        self.assertIn("/nowhere/python has no torch for the GPU and numpy: left out", said)

    def test_policies_have_one_digest(self):
        result, said = self.figures("gpu-policies")
        for name in ("gpt2_xl", "llama_7b"):
            self.assertEqual(result["settings"][name]["policies"], ["host", "static:0.5", "interleave:2", "stream", "auto"])
            self.assertEqual(result["figures"][f"{name}_different_digests"], 1)
            self.assertRegex(result["settings"][name]["state_digest"], "^[0-9a-f]{32}$")
            self.assertIn(f"{name}_interleave_2_exposed_update_seconds", result["figures"])
        self.assertIn("torch for the GPU and deepspeed: left out", said)

    def test_a_part_can_be_chosen(self):
        done = self.run_benchmark("gpu-policies", TANDEM_BENCH_SHAPES="gpt2_xl", TANDEM_BENCH_POLICIES="auto host")
        self.assertEqual(done.returncode, 0, done.stderr)
        settings = json.loads(done.stdout)["settings"]
        self.assertEqual({name: setting["policies"] for name, setting in settings.items()}, {"gpt2_xl": ["host", "auto"]})
        done = self.run_benchmark("gpu-training", TANDEM_BENCH_SHAPES="gpt3")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr.splitlines()[-1], "^bench: TANDEM_BENCH_SHAPES: gpt3 is none of llama_7b gpt2_xl$")

    def test_what_was_measured_before_the_end_is_kept(self):
        def figures_of_a_run():
            done = self.run_benchmark("gpu-policies", TANDEM_BENCH_SHAPES="gpt2_xl", TANDEM_BENCH_POLICIES="stream host",
                                      TANDEM_BENCH_WORK=str(self.programs / "work"))
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["figures"]

        first = figures_of_a_run()
        (rows,) = self.programs.glob("work/rows-*/rows.jsonl")
        whole = rows.read_text().splitlines(keepends=True)
        rows.write_text("".join(whole[:-1]))
        second = figures_of_a_run()
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


class Arithmetic(unittest.TestCase):
    def test_weights_in_products_are_those_of_the_models(self):
        import gpu
        # Of GPT-2 XL 1,557,611,200: less positions, biases and norms. Of Llama 2 7B 6,738,415,616: less its embedding and
        # norms.
        self.assertEqual(gpu.GPT2_XL.weights, 1_557_611_200 - 1024 * 1600 - (13 * 48 + 2) * 1600)
        self.assertEqual(gpu.LLAMA_7B.weights, 6_738_415_616 - 32000 * 4096 - (2 * 32 + 1) * 4096)
        self.assertEqual(gpu.GPT2_XL.flops(2), 2 * 1024 * (6 * gpu.GPT2_XL.weights + 6 * 48 * 1600 * 1024))


if __name__ == "__main__":
    unittest.main()
