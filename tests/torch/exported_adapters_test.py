"""Adapters that tandem has trained, of experts and of layers that files hold in one tensor, as PEFT loads them."""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import torch

try:
    import peft
    from transformers import AutoModelForCausalLM
except ImportError:
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop(1)).parent
FIXTURES = ROOT / "tests" / "models" / "fixtures"

RANK = ["--lora-rank", "3", "--lora-alpha", "12"]
CASES = {
    "phi3": [[]],
    "mixtral": [["--lora-experts", "all"], ["--lora-targets", "w1,w2,w3,v_proj"]],
    "qwen3_moe": [["--lora-experts", "all", "--lora-targets", "none"],
                  ["--lora-targets", "q_proj,gate_proj,up_proj,down_proj"]],
    "olmoe": [["--lora-experts", "down_proj"], ["--lora-experts", "layers.1.mlp.experts.gate_up_proj,0.mlp.experts.down_proj"]],
}


def read_safetensors(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    metadata = header.pop("__metadata__", {})
    return {n: (t, content[8 + length:][slice(*t["data_offsets"])]) for n, t in header.items()}, metadata


def write_base(folder, name):
    """The model of a fixture."""
    tensors, metadata = read_safetensors(FIXTURES / f"{name}.safetensors")
    folder.mkdir()
    (folder / "config.json").write_text(metadata["config"])
    header, data = {}, b""
    for n, (described, content) in tensors.items():
        if f"grad.{n}" in tensors:
            header[n] = {**described, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


class ExportedAdapters(unittest.TestCase):
    def run_tandem(self, *arguments):
        done = subprocess.run([str(a) for a in (BUILD / "tandem", *arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def logits(self, folder, adapter=None):
        # Other kernels of experts want sizes that the fixtures do not have.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter)
        with torch.no_grad():
            return model(torch.arange(1, 12).unsqueeze(0)).logits

    def test_logits_are_those_of_the_merged_model(self):
        for name, flag_sets in CASES.items():
            for flags in flag_sets:
                with self.subTest(name, flags=flags), tempfile.TemporaryDirectory() as folder:
                    self.check(pathlib.Path(folder), name, flags)

    def check(self, root, name, flags):
        base, out, adapter, merged = (root / part for part in ("base", "out", "adapter", "merged"))
        write_base(base, name)
        ids = [(7 * i * i + 3 * i) % 101 for i in range(200)]
        (root / "ids.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
        self.run_tandem("train", "--model", base, "--data", root / "ids.bin", "--seq-len", "16", "--device", "host",
                        "--threads", "1", "--steps", "4", "--lr", "5e-2", *RANK, *flags, "--out", out)
        self.run_tandem("export", out, "--to", adapter, "--dtype", "fp32")
        self.run_tandem("export", out, "--merged", "--to", merged, "--dtype", "fp32")
        without, with_it, whole = self.logits(base), self.logits(base, adapter), self.logits(merged)
        self.assertLess((with_it - whole).abs().max().item(), 1e-4)
        self.assertGreater((with_it - without).abs().max().item(), 1e-2, "the adapter does too little to show anything")


if __name__ == "__main__":
    unittest.main(verbosity=1)
