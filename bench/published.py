"""published: the performance model against published measurements of 4 x H100: errors on the rows with interleaving."""
import json
import subprocess

import harness

DATA = harness.ROOT / "bench" / "data"


def measure():
    harness.build("bench_published")
    done = subprocess.run([harness.program("bench_published"), DATA / "published_h100.csv",
                           DATA / "published_facts.json", harness.ROOT / "profiles" / "h100x4-node.toml"],
                          stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise harness.BenchError("bench_published failed")
    result = json.loads(done.stdout)
    harness.say(table(result["rows"]))
    figures = harness.Figures()
    for name in ("worst_iter_error", "worst_update_error", "misordered_iterations", "misordered_updates",
                 "worst_iter_error_stated_overhead", "misordered_iterations_stated_overhead"):
        figures.add(name, [result[name]])
    return figures.line("published", calibrated=result["calibrated"], rows=result["rows"])


def table(rows):
    """Rows that were predicted, as the docs show them."""
    lines = ["| model | ratio | stride | iteration, s | predicted | error | update, s | predicted | error |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["stride"] == 0:
            continue
        cells = [row["model"], row["offload_ratio"], row["stride"]]
        for name in ("iter_s", "update_s"):
            measured, predicted = row[name], row[f"predicted_{name}"]
            cells += [f"{measured:.2f}", f"{predicted:.2f}", f"{100 * (predicted / measured - 1):+.1f}%"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)
