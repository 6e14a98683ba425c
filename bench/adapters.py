"""adapters: LoRA of rank 16 over 24 layers whose frozen weights are streamed, on the host device.

`nf4_link_over_bf16` and `base_bytes_per_parameter` count the blocks' frozen matrices alone. `streamed_over_resident` is a step over an
emulated link that can keep up, beside one with all weights on the device. `tokens_over_peft` is beside PEFT and transformers on the
same cores: one model, in fp32 there and with weights in bf16 and activations in fp32 here, all activations kept on both sides.
"""
import statistics

import harness
from race import Race

TURNS, WARM_UP = 11, 2
RANK, LAYERS, WIDTH, SEQUENCE, BATCH, VOCABULARY = 16, 24, 512, 256, 1, 4096
SHAPE = [f"layers={LAYERS}", f"width={WIDTH}", f"sequence={SEQUENCE}", f"batch={BATCH}", f"vocabulary={VOCABULARY}",
         "family=llama", f"lora={RANK}", "recompute=0"]
FORMATS = ("bf16", "int8", "nf4", "nf4-double", "fp8")


def program(*settings):
    return [harness.program("bench_steps"), *SHAPE, f"threads={harness.cores()}", *settings]


def streamed(base, *settings):
    return program("policy=host", "prefetch=2", "resident=0", f"base={base}", *settings)


def add_bytes(figures):
    """Bytes of the base in each format, and the seconds of a step that streams NF4 without a limit."""
    with Race({base: streamed(base) for base in FORMATS}) as race:
        facts = {base: race.facts(base) for base in FORMATS}
        race.run(3, 1)
        seconds = statistics.median(race.seconds("nf4"))
    figures.add("nf4_link_over_bf16", [facts["nf4"]["base_bytes"] / facts["bf16"]["base_bytes"]])
    figures.add("nf4_step_link_over_bf16", [facts["nf4"]["to_device"] / facts["bf16"]["to_device"]])
    for base in FORMATS[1:]:
        spelled = "" if base == "nf4" else f"_{base.replace('-', '_')}"
        figures.add(f"base_bytes_per_parameter{spelled}", [facts[base]["base_bytes"] / facts[base]["base_elements"]])
    return facts["nf4"], seconds


def add_streaming(figures, facts, seconds):
    link = f"link={2 * (facts['to_device'] + facts['to_host']) / seconds}"
    with Race({"streamed": streamed("nf4", link), "resident": program("policy=device", "base=nf4", link)}) as race:
        race.run(TURNS, WARM_UP)
        figures.add("streamed_over_resident", harness.ratios(race.seconds("streamed"), race.seconds("resident")))
        for name in ("streamed", "resident"):
            figures.add(f"nf4_{name}_step_seconds", race.seconds(name))


def add_peft(figures):
    python = harness.peers("torch", "numpy", "transformers", "peft")
    script = harness.ROOT / "bench" / "peers" / "peft_lora.py"
    peer = [python, script, *map(str, (harness.cores(), LAYERS, WIDTH, SEQUENCE, BATCH, VOCABULARY, RANK))]
    ours = {"resident": program("policy=device", "base=bf16"), "streamed_nf4": streamed("nf4")}
    with Race({**ours, "peft": peer}, harness.path_with(python)) as race:
        race.run(TURNS, WARM_UP)
        for name in ours:
            suffix = "" if name == "resident" else f"_{name}"
            figures.add(f"tokens_over_peft{suffix}", harness.ratios(race.seconds("peft"), race.seconds(name)))
        for name in (*ours, "peft"):
            figures.add(f"{name}_step_seconds", race.seconds(name))


def measure():
    harness.build("bench_steps")
    figures = harness.Figures()
    add_streaming(figures, *add_bytes(figures))
    add_peft(figures)
    return figures.line("adapters", turns=TURNS, threads=harness.cores(), layers=LAYERS, width=WIDTH,
                        tokens=SEQUENCE * BATCH, rank=RANK)
