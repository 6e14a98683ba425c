"""Adapters of experts, of routers and of layers that files hold in one tensor: those that tandem has trained as PEFT loads them, and those that PEFT
has made as tandem does."""
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
    "mixtral": [["--lora-experts", "all"], ["--lora-targets", "w1,w2,w3,v_proj"],
                ["--lora-experts", "gate_up_proj, down_proj, mlp.gate.weight"]],
    "qwen3_moe": [["--lora-experts", "all", "--lora-targets", "none"],
                  ["--lora-targets", "q_proj,gate_proj,up_proj,down_proj"], ["--lora-targets", "gate"]],
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


class AdaptersOfPeft(unittest.TestCase):
    def run_tandem(self, *arguments):
        done = subprocess.run([str(a) for a in (BUILD / "tandem", *arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def base(self, root, name):
        """The model of a fixture as a folder, and flags for a text."""
        write_base(root / "base", name)
        ids = [(7 * i * i + 3 * i) % 101 for i in range(193)]
        (root / "ids.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
        return root / "base", ids, ["--data", root / "ids.bin", "--seq-len", "16", "--device", "host", "--threads", "1"]

    def load(self, folder):
        # Other kernels of experts want sizes that the fixtures do not have.
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")

    def logits(self, folder, adapter=None):
        model = self.load(folder)
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
        out, adapter, merged = (root / part for part in ("out", "adapter", "merged"))
        base, _, work = self.base(root, name)
        self.run_tandem("train", "--model", base, *work, "--steps", "4", "--lr", "5e-2", *RANK, *flags, "--out", out)
        self.run_tandem("export", out, "--to", adapter, "--dtype", "fp32")
        self.run_tandem("export", out, "--merged", "--to", merged, "--dtype", "fp32")
        without, with_it, whole = self.logits(base), self.logits(base, adapter), self.logits(merged)
        self.assertLess((with_it - whole).abs().max().item(), 1e-4)
        self.assertGreater((with_it - without).abs().max().item(), 1e-2, "the adapter does too little to show anything")

    def test_what_peft_makes_of_experts_modules_is_taken(self):
        """PEFT makes one parameter of them, with ranks and alphas by module."""
        for name, targets in [("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]), ("mixtral", ["w1", "w2", "w3"]),
                              ("mixtral", "all-linear"), ("mixtral", ["gate", "v_proj"])]:
            with self.subTest(name, targets=targets), tempfile.TemporaryDirectory() as folder:
                base, ids, work = self.base(pathlib.Path(folder), name)
                torch.manual_seed(5)
                model = peft.get_peft_model(self.load(base), peft.LoraConfig(r=2, lora_alpha=5, target_modules=targets))
                with torch.no_grad():
                    for n, p in model.named_parameters():
                        if "lora_B" in n:
                            p.copy_((0.2 * torch.randn(p.shape)).to(torch.bfloat16))
                        elif "lora_A" in n:
                            p.copy_(p.to(torch.bfloat16))
                    windows, targets = (torch.tensor(part).reshape(-1, 16) for part in (ids[:-1], ids[1:]))
                    logits = model(windows).logits
                    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
                model.save_pretrained(pathlib.Path(folder) / "adapter")
                written = self.run_tandem("eval", "--model", base, "--adapter", pathlib.Path(folder) / "adapter", *work, "--json")
                self.assertLess(abs(json.loads(written)["loss"] / expected - 1), 1e-5)
                written = self.run_tandem("eval", "--model", base, *work, "--json")
                self.assertGreater(abs(json.loads(written)["loss"] / expected - 1), 1e-3)


if __name__ == "__main__":
    unittest.main(verbosity=1)
