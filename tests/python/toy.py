"""Parts that the tests of the Python package share: the built package, and a small training like that of twin.cpp."""
import os
import pathlib
import sys

PACKAGE = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None  # the folder that holds tandem/
if PACKAGE:
    sys.path.insert(0, str(PACKAGE))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np  # noqa: E402
import tandem  # noqa: E402

LAYERS = 3
MICRO_BATCHES = 2


def make_layout():
    layout = tandem.ParameterLayout()
    for i in range(LAYERS):
        layer = layout.add_layer(f"h.{i}")
        layer.add("w1", (48, 37)).add("b1", 55, decay=False)
        layer.add("w2", (1, 2200), gradient="bf16").add("still", 22, trainable=False)
    layout.add_layer("head").add("table", (48, 37))
    layout.tie("h.0.w1", "head.table")
    return layout


def start(parameter):
    return ((np.arange(parameter.count) % 13 - 6) * np.float32(0.03125)).astype(np.float32)


def widened(bf16):
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def rounded(values):
    """fp32 to bf16 as uint16, to nearest even; finite values alone."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def fill(weights, gradients, micro):
    for name in weights:
        target = gradients[name]
        if target is None:
            continue
        values = widened(weights[name].numpy()) * np.float32(0.5)
        index = np.arange(values.size).reshape(values.shape)
        values = values + ((index % 7 - 3 + micro) * 0.125).astype(np.float32)
        if target.dtype == "f32":
            target.numpy()[...] += values
        else:
            target.numpy()[...] = rounded(values)


class Toy:
    """An engine on the host device, ready to train."""

    def __init__(self, policy="interleave:2", device=None, **options):
        self.device = device or tandem.open_device("host", memory="32MiB", threads=1, update_threads=1)
        self.layout = make_layout()
        self.options = tandem.OffloadOptions(**{"device_memory": "1MiB", "policy": policy, "subgroup_size": 1024,
                                                "max_micro_batches": MICRO_BATCHES, **options})
        self.plan = tandem.make_plan(self.layout, self.options, self.device)
        self.engine = tandem.OffloadEngine(self.device, self.layout, self.options, self.plan)
        self.engine.initialize(start)
        self.stream = self.device.make_stream("compute")

    def pass_through(self, micro=0):
        for i in range(len(self.layout)):
            with self.engine.fetch(i, self.stream):
                pass
        for i in reversed(range(len(self.layout))):
            with self.engine.fetch(i, self.stream) as weights, self.engine.gradients(i, self.stream) as gradients:
                fill(weights, gradients, micro)

    def step(self, **values):
        self.engine.begin_step(**{"lr": 1e-2, "max_grad_norm": 1.0, "micro_batches": MICRO_BATCHES, **values})
        for micro in range(values.get("micro_batches", MICRO_BATCHES)):
            self.pass_through(micro)
        return self.engine.end_step()
