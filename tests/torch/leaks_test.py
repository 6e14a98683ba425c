"""A thousand steps of both ways to train leave nothing behind: references, host memory, device memory."""
import gc
import resource
import unittest

from sandbox import Small, make, tandem, torch
from sandbox import train as train_small
from stream_test import streamed, train


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Leaks(unittest.TestCase):
    def check(self, device, steps):
        """`steps(first, count)` trains; the first two hundred fill caches of PyTorch's."""
        steps(0, 200)
        gc.collect()
        live, allocated, resident = tandem._core._live(), device.allocated_bytes, resident_bytes()
        steps(200, 1000)
        gc.collect()
        self.assertEqual((tandem._core._live(), device.allocated_bytes), (live, allocated))
        self.assertLess(resident_bytes() - resident, 8 << 20)

    def test_streaming(self):
        for recompute in ("units", "none"):
            model, optimizer = streamed(dtype=torch.bfloat16, policy="interleave:2", recompute=recompute)
            self.check(model.tandem.engine.device, lambda first, count: train(model, optimizer, count, first=first))

    def test_optimizer(self):
        for gradients in ("keep", "take"):
            module = Small()
            optimizer = make(module, policy="host", gradients=gradients, module=module)
            self.check(optimizer.engine.device, lambda first, count: train_small(module, optimizer, count, first=first))


if __name__ == "__main__":
    unittest.main()
