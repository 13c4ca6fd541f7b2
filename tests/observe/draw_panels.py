#!/usr/bin/env python3
"""Draws the dashboards as pictures, from the same queries on a real Prometheus: to look at them without a Grafana.

usage: HIERAD_BIN_DIR=build/release/bin .deps/venv/bin/python tests/observe/draw_panels.py FOLDER [SECONDS]
"""
import json
import sys
import time
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import observe

COLUMN, ROW = 60, 34   # pixels of a unit of Grafana's grid
COLORS = ["#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300"]
FIXED = {"red": "#e24d42", "green": "#56a64b", "blue": "#3274d9", "orange": "#ff780a", "purple": "#8f3bb8", "text": "#8e8e8e"}
FONT, SMALL, LARGE = (ImageFont.load_default(size) for size in (13, 10, 28))


def shown(value, unit):
    if unit == "percentunit":
        return f"{100 * value:.1f}%"
    if unit == "bytes":
        return f"{value / 2**30:.1f} GiB"
    if unit == "Bps":
        return f"{value / 2**20:.1f} MiB/s"
    text = f"{value:.3g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return text + (" s" if unit == "s" else "")


def legend(form, labels):
    for name, value in labels.items():
        form = form.replace("{{%s}}" % name, value)
    return form or "value"


def draw_lines(draw, box, panel, series):
    left, top, right, bottom = box[0] + 48, box[1] + 24, box[2] - 8, box[3] - 30
    unit = panel["fieldConfig"]["defaults"]["unit"]
    stack = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    fixed = {o["matcher"]["options"]: FIXED[o["properties"][0]["value"]["fixedColor"]] for o in panel["fieldConfig"]["overrides"]}
    times = sorted({t for _, values in series for t, _ in values})
    if not times:
        return
    base = {t: 0.0 for t in times}
    curves = []
    for name, values in series:
        points = []
        for t, v in values:
            if v != v or v in (float("inf"), float("-inf")):
                continue
            low = base[t] if stack else 0.0
            points.append((t, low, low + v if stack else v))
            if stack:
                base[t] += v
        curves.append((name, points))
    every = [p[2] for _, points in curves for p in points] or [0.0]
    low, high = (0.0 if stack else min(every)), max(every)
    if high <= low:
        high = low + (abs(low) or 1)
    x = lambda t: left + (right - left) * (t - times[0]) / max(1, times[-1] - times[0])
    y = lambda v: bottom - (bottom - top) * (v - low) / (high - low)
    for share in (0, 0.5, 1):
        v = low + share * (high - low)
        draw.line((left, y(v), right, y(v)), fill="#333a45")
        draw.text((box[0] + 4, y(v) - 6), shown(v, unit), font=SMALL, fill="#9fa7b3")
    at = left
    for i, (name, points) in enumerate(curves):
        color = fixed.get(name, COLORS[i % len(COLORS)])
        if stack and len(points) > 1:
            draw.polygon([(x(t), y(v)) for t, _, v in points] + [(x(t), y(v)) for t, v, _ in reversed(points)], fill=color)
        elif len(points) > 1:
            draw.line([(x(t), y(v)) for t, _, v in points], fill=color, width=2)
        if at < right - 60:
            draw.rectangle((at, bottom + 12, at + 10, bottom + 14), fill=color)
            draw.text((at + 14, bottom + 7), name[:24], font=SMALL, fill="#ccd2da")
            at += 22 + 6 * len(name[:24])


def draw_board(board, prometheus, job, start, end, path):
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    image = Image.new("RGB", (24 * COLUMN, height * ROW + 36), "#0f1216")
    draw = ImageDraw.Draw(image)
    draw.text((10, 8), board["title"], font=FONT, fill="#fff")
    for panel in board["panels"]:
        g = panel["gridPos"]
        box = (g["x"] * COLUMN + 3, g["y"] * ROW + 36, (g["x"] + g["w"]) * COLUMN - 3, (g["y"] + g["h"]) * ROW + 32)
        draw.rectangle(box, fill="#181b1f", outline="#2a2f36")
        draw.text((box[0] + 8, box[1] + 5), panel["title"], font=FONT, fill="#ccd2da")
        series, columns = [], []
        for target in panel["targets"]:
            expression = target["expr"].replace("$job", str(job)).replace("$__rate_interval", "1m")
            if panel["type"] == "timeseries":
                for s in prometheus.query_range(expression, start, end):
                    series.append((legend(target["legendFormat"], s["metric"]), [(t, float(v)) for t, v in s["values"]]))
            else:
                columns.append(prometheus.query(expression))
        if panel["type"] == "timeseries":
            draw_lines(draw, box, panel, series)
        elif panel["type"] == "stat":
            value = float(columns[0][0]["value"][1]) if columns[0] else float("nan")
            draw.text((box[0] + 10, box[1] + 34), shown(value, panel["fieldConfig"]["defaults"]["unit"]), font=LARGE, fill="#73bf69")
        else:
            by_job = [{s["metric"].get("job_id"): s for s in found} for found in columns]
            for line, job_id in enumerate(sorted(by_job[0], key=int)):
                first = by_job[0][job_id]["metric"]
                cells = [job_id, first["name"], first["state"], first["submitter"], first["data"]]
                cells += [f"{float(found[job_id]['value'][1]):.4g}" if job_id in found else "" for found in by_job[1:]]
                for i, cell in enumerate(cells):
                    draw.text((box[0] + 10 + i * 140, box[1] + 28 + 17 * line), cell, font=FONT, fill="#ccd2da")
    image.save(path)


def main():
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60
    folder.mkdir(parents=True, exist_ok=True)
    c = observe.FakeCluster(slots=10)
    try:
        prometheus = observe.Prometheus(c.folder, f"127.0.0.1:{c.metrics_port}")
        try:
            start = time.time()
            jobs = [c.submit_fake(name, ranks) for name, ranks in (("good", 2), ("data", 1), ("comm", 1), ("slow", 1), ("nan", 1), ("oom", 1), ("waits", 12))]
            c.submit_fake("short", steps=40)
            time.sleep(seconds)
            for path in sorted((observe.ROOT / "deploy/grafana").glob("hierad-*.json")):
                draw_board(json.loads(path.read_text()), prometheus, jobs[0], start, time.time(), folder / f"{path.stem}.png")
                print(folder / f"{path.stem}.png")
        finally:
            prometheus.close()
    finally:
        c.close()


if __name__ == "__main__":
    main()
