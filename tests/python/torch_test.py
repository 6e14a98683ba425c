"""Beside PyTorch, in a Python that has it: either order of imports, and tensors by DLPack without a copy."""
import importlib.util
import os
import pathlib
import subprocess
import sys
import unittest

if not importlib.util.find_spec("torch"):
    build = pathlib.Path(__file__).resolve().parents[2] / "build"
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/torch"
    for other in (build / "torch-venv", build / "bench-venv"):
        if (other / packages).is_dir():
            os.execv(other / "bin" / "python", [str(other / "bin" / "python"), *sys.argv])
    print("skipped: no PyTorch for this Python")
    sys.exit(77)

import toy  # noqa: E402
from toy import np, tandem  # noqa: E402


class Beside(unittest.TestCase):
    def test_either_is_imported_first(self):
        for order in ("torch, tandem", "tandem, torch"):
            script = (f"import sys; sys.path.insert(0, sys.argv[1]); import {order}\n"
                      "x = torch.randn(64, 64); y = torch.nn.functional.linear(x, x)\n"
                      "d = tandem.open_device('host', memory='32MiB', threads=1)\n"
                      "try: tandem.open_device('cuda:99')\nexcept tandem.DeviceError: print('caught')\n")
            done = subprocess.run([sys.executable, "-c", script, str(toy.PACKAGE)], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (0, "caught\n"), done.stderr)

    def test_either_order_trains_to_the_same_bits(self):
        """Both libraries bring threads and an OpenMP or oneTBB of their own: ten steps of both in one process, within a minute."""
        found = set()
        for order in ("torch, tandem", "tandem, torch"):
            script = (f"import sys; sys.path.insert(0, sys.argv[1]); import {order}\n"
                      "torch.manual_seed(0); torch.set_num_threads(1)\n"
                      "model = torch.nn.Linear(64, 64).bfloat16(); data = torch.randn(8, 64).bfloat16()\n"
                      "optimizer = tandem.optim.AdamW(model.parameters(), device_memory='16MiB')\n"
                      "for _ in range(10):\n"
                      "    optimizer.zero_grad(); model(data).float().square().mean().backward(); optimizer.step()\n"
                      "print(optimizer.engine.step, optimizer.digest())\n")
            done = subprocess.run([sys.executable, "-c", script, str(toy.PACKAGE)], capture_output=True, text=True, timeout=60)
            self.assertRegex(done.stdout, r"\A10 [0-9a-f]{32}\n\Z", done.stderr)
            found.add(done.stdout)
        self.assertEqual(len(found), 1)

    def test_tensors_share_the_memory_of_views(self):
        import torch
        trainer = toy.Toy()
        engine = trainer.engine
        engine.begin_step(micro_batches=1)
        with engine.fetch(1, trainer.stream) as weights:
            tensor = torch.from_dlpack(weights["w1"])
            self.assertEqual((tensor.dtype, tuple(tensor.shape), tensor.data_ptr()), (torch.bfloat16, (48, 37), weights["w1"].pointer))
            self.assertTrue(np.array_equal(tensor.float().numpy().ravel()[:13], toy.start(trainer.layout.parameter("h.1.w1"))[:13]))
            with self.assertRaisesRegex(tandem.MisuseError, "1 array is"):
                weights.release()
            del tensor
        with engine.gradients(1, trainer.stream) as gradients:
            sums = torch.from_dlpack(gradients["w1"])
            sums.add_(torch.ones(48, 37))
            written = torch.from_dlpack(gradients["w2"])
            written.fill_(0.5)
            self.assertEqual((gradients["w1"].copy().sum(), gradients["w2"].copy()[0, 0]), (48 * 37, 0x3F00))
            del sums, written
        engine.abort_step()

    def test_state_is_written_from_tensors(self):
        import torch
        engine = toy.Toy().engine
        for values in (torch.full((48, 37), 1.5), torch.full((48, 37), 1.5, dtype=torch.bfloat16)):
            engine.write("h.1.w1", torch.zeros(48, 37))
            engine.write("h.1.w1", values)
            self.assertEqual(engine.read("h.1.w1").sum(), 1.5 * 48 * 37)


if __name__ == "__main__":
    unittest.main()
