#!/usr/bin/env python3
"""Draws a step of a trace (tandem train --trace, or a simulated one of tandem bench) as SVG.

    tools/draw_trace.py trace.json step.svg --step 3
    tools/draw_trace.py simulated-auto.trace.json step.svg
"""
import argparse
import html
import json
import pathlib
import sys

WIDTH, ROW, LEFT, TOP, GAP = 1200, 34, 150, 50, 8
TRACKS = ["caller", "host to device", "device to host", "device", "cpu", "disk"]
LABELS = {"caller": "forward, backward", "device": "device, other", "cpu": "CPU"}
# Colour by what is done; those not named here are grey.
COLOURS = [("forward", "#4e79a7"), ("layer_use", "#4e79a7"), ("backward", "#2f4b6e"), ("commit", "#2f4b6e"),
           ("fetch_weights", "#f28e2b"), ("push_weights", "#f28e2b"), ("load_state", "#e15759"),
           ("store_state", "#e15759"), ("store_weights", "#ffbe7d"), ("flush_gradient", "#59a14f"),
           ("round_gradient", "#8cd17d"), ("sum_gradient", "#8cd17d"), ("keep_gradient", "#8cd17d"),
           ("accumulate_gradient", "#8cd17d"), ("finish_gradient", "#8cd17d"), ("fetch_norm", "#b6992d"),
           ("save_state", "#76b7b2"), ("update", "#b07aa1")]


def fail(message):
    sys.exit(f"draw_trace.py: error: {message}")


def read(path):
    """Spans by track: (name, begin, end) in seconds, in the order of their beginning."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path}: no trace: {error}")
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks = {}
    for e in events:
        if e["ph"] == "X":
            tracks.setdefault(names[e["tid"]], []).append((e["name"], 1e-6 * e["ts"], 1e-6 * (e["ts"] + e["dur"])))
    return {track: sorted(spans, key=lambda s: s[1]) for track, spans in tracks.items()}


def window(tracks, step):
    """When the step began and ended; the whole trace where it has no steps."""
    steps = {name: (begin, end) for name, begin, end in tracks.get("steps", [])}
    if step is None and steps:
        step = max(int(name.split()[1]) for name in steps)
    if step is not None:
        if f"step {step}" not in steps:
            fail(f"no step {step}; the trace has {', '.join(steps) or 'no steps'}")
        return steps[f"step {step}"]
    spans = [s for track in TRACKS for s in tracks.get(track, [])]
    if not spans:
        fail("the trace is empty")
    return min(s[1] for s in spans), max(s[2] for s in spans)


def colour(name):
    return next((c for kind, c in COLOURS if name.startswith(kind)), "#bab0ac")


def draw(tracks, begin, end, title):
    x = lambda t: LEFT + (WIDTH - LEFT - 20) * (t - begin) / (end - begin)
    shown = [t for t in TRACKS if tracks.get(t)]
    height = TOP + len(shown) * (ROW + GAP) + 80
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
           f'font-size="13"><rect width="100%" height="100%" fill="white"/>',
           f'<text x="{LEFT}" y="26" font-size="16">{html.escape(title)}</text>']
    kinds = {}
    for i, track in enumerate(shown):
        y = TOP + i * (ROW + GAP)
        out.append(f'<text x="{LEFT - 10}" y="{y + ROW / 2 + 5}" text-anchor="end">{LABELS.get(track, track)}</text>'
                   f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{ROW}" fill="#f2f2f2"/>')
        for name, first, last in tracks[track]:
            if last <= begin or first >= end:
                continue
            left, right = x(max(first, begin)), x(min(last, end))
            kind = name.split()[0]
            kinds[kind] = kinds.get(kind, 0.0) + last - first
            out.append(f'<rect x="{left:.2f}" y="{y}" width="{max(right - left, 0.3):.2f}" height="{ROW}" '
                       f'fill="{colour(name)}" stroke="white" stroke-width="0.4"><title>{html.escape(name)}: '
                       f'{1e3 * (last - first):.2f} ms</title></rect>')
            if right - left > 7 * len(name.split()[-1]) and track == "caller":
                out.append(f'<text x="{(left + right) / 2:.1f}" y="{y + ROW / 2 + 4}" fill="white" font-size="10" '
                           f'text-anchor="middle">{html.escape(name.split()[1] if " " in name else name)}</text>')
    y = TOP + len(shown) * (ROW + GAP)
    out.append(f'<text x="{LEFT}" y="{y + 14}">0</text><text x="{WIDTH - 20}" y="{y + 14}" text-anchor="end">'
               f'{1e3 * (end - begin):.0f} ms</text>')
    seen = [kind for kind, seconds in kinds.items() if seconds > 0.001 * (end - begin)]
    order = [kind for kind, _ in COLOURS]
    at = 0
    for kind in sorted(seen, key=lambda k: next((i for i, c in enumerate(order) if k.startswith(c)), len(order))):
        left, below = LEFT + 150 * (at % 7), y + 28 + 20 * (at // 7)
        out.append(f'<rect x="{left}" y="{below}" width="12" height="12" fill="{colour(kind)}"/>'
                   f'<text x="{left + 16}" y="{below + 11}" font-size="11">{html.escape(kind)}</text>')
        at += 1
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description="A step of a trace as SVG.")
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path, help="the SVG to write")
    parser.add_argument("--step", type=int, help="which. Default: the last one, or the whole of a simulated trace")
    parser.add_argument("--title", default="", help="above the picture")
    arguments = parser.parse_args()
    tracks = read(arguments.trace)
    begin, end = window(tracks, arguments.step)
    arguments.picture.write_text(draw(tracks, begin, end, arguments.title))


if __name__ == "__main__":
    main()
