#!/usr/bin/env python3
"""Writes the Grafana dashboards beside it: hierad-*.json.

usage: deploy/grafana/generate.py            write them
       deploy/grafana/generate.py --check    exit 1 if one differs from what would be written
"""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = {"type": "prometheus", "uid": "${source}"}
PHASES = {"data_wait": "red", "forward": "green", "backward": "blue", "comm": "orange", "optimizer": "purple", "other": "text"}


class Board:
    def __init__(self, key, title, about, job=False):
        self.key, self.title, self.about, self.job = key, title, about, job
        self.panels, self.x, self.y, self.row_height = [], 0, 0, 0

    def place(self, width, height):
        if self.x + width > 24:
            self.x, self.y = 0, self.y + self.row_height
            self.row_height = 0
        at = {"x": self.x, "y": self.y, "w": width, "h": height}
        self.x += width
        self.row_height = max(self.row_height, height)
        return at

    def panel(self, kind, title, queries, unit="short", width=8, height=7, about="", stack=False, log=False, **more):
        """queries: (expression, legend) pairs."""
        custom = {"lineWidth": 1, "fillOpacity": 60 if stack else 8, "showPoints": "never",
                  "stacking": {"mode": "normal" if stack else "none"},
                  "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"}}
        defaults = {"unit": unit, "custom": custom if kind == "timeseries" else {}}
        defaults.update(more.pop("defaults", {}))
        panel = {"id": len(self.panels) + 1, "type": kind, "title": title, "description": about, "datasource": SOURCE,
                 "gridPos": self.place(width, height),
                 "targets": [{"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend,
                              "range": kind == "timeseries", "instant": kind != "timeseries",
                              "format": "table" if kind == "table" else "time_series"}
                             for i, (expr, legend) in enumerate(queries)],
                 "fieldConfig": {"defaults": defaults, "overrides": more.pop("overrides", [])},
                 "options": more.pop("options", {})}
        panel.update(more)
        self.panels.append(panel)

    def lines(self, title, queries, **more):
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
        self.panel("timeseries", title, queries, options=options, **more)

    def number(self, title, expr, unit="short", width=4, height=4, thresholds=None, **more):
        steps = [{"color": "green", "value": None}] + [{"color": c, "value": v} for v, c in thresholds or []]
        self.panel("stat", title, [(expr, "")], unit=unit, width=width, height=height,
                   defaults={"thresholds": {"mode": "absolute", "steps": steps}},
                   options={"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}, **more)

    def phases(self, title, expr, unit="percentunit", **more):
        overrides = [{"matcher": {"id": "byName", "options": phase},
                      "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}]} for phase, color in PHASES.items()]
        self.lines(title, [(expr, "{{phase}}")], unit=unit, stack=True, overrides=overrides, **more)

    def table(self, title, queries, columns, **more):
        """columns: label or `Value #A` -> heading; others are hidden."""
        self.panel("table", title, queries, transformations=[
            {"id": "joinByField", "options": {"byField": "job_id", "mode": "outer"}} if len(queries) > 1 else {"id": "merge", "options": {}},
            {"id": "organize", "options": {"renameByName": columns, "indexByName": {name: i for i, name in enumerate(columns)}}},
            {"id": "filterFieldsByName", "options": {"include": {"names": list(columns.values())}}}], **more)

    def json(self):
        variables = [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}, "hide": 0}]
        if self.job:
            variables.append({"name": "job", "label": "Job", "type": "query", "datasource": SOURCE, "refresh": 2, "multi": False,
                              "includeAll": False, "sort": 4, "query": {"query": "label_values(hierad_job_info, job_id)", "refId": "job"},
                              "definition": "label_values(hierad_job_info, job_id)", "current": {}, "hide": 0})
        return {"uid": f"hierad-{self.key}", "title": f"hierad: {self.title}", "description": self.about, "tags": ["hierad"],
                "schemaVersion": 38, "version": 1, "editable": True, "graphTooltip": 1, "refresh": "15s",
                "time": {"from": "now-3h", "to": "now"}, "timezone": "browser", "templating": {"list": variables}, "annotations": {"list": []},
                "links": [{"type": "dashboards", "tags": ["hierad"], "title": "hierad", "asDropdown": True, "keepTime": True}],
                "panels": self.panels}


def fleet():
    b = Board("fleet", "fleet", "All jobs at a glance.")
    b.number("Running", 'sum(hierad_jobs{state="running"})')
    b.number("Queued", 'sum(hierad_jobs{state="queued"})')
    b.number("Busy slots", 'sum(hierad_slots{state="busy"}) / sum(hierad_slots)', unit="percentunit")
    b.number("Lost slots", 'sum(hierad_slots{state="lost"})', thresholds=[(1, "red")])
    b.number("Samples a second", "sum(hierad_job_samples_per_second)")
    b.number("Alerts of jobs", "sum(hierad_job_alerts)", thresholds=[(1, "orange")])
    b.table("Jobs", [("hierad_job_info", ""), ("hierad_job_step / (hierad_job_total_steps > 0)", ""), ("hierad_job_loss", ""),
                     ("hierad_job_samples_per_second", ""), ("hierad_job_eta_seconds", ""), ("hierad_job_alerts", "")],
            {"job_id": "Job", "name": "Name", "state": "State", "submitter": "By", "data": "Data", "Value #B": "Done", "Value #C": "Loss",
             "Value #D": "Samples/s", "Value #E": "ETA s", "Value #F": "Alerts"}, width=24, height=8)
    name = " * on (job_id) group_left (name) hierad_job_info"
    b.lines("Loss", [(f"hierad_job_loss{name}", "{{job_id}} {{name}}")], width=12, log=True)
    b.lines("Samples a second", [(f"hierad_job_samples_per_second{name}", "{{job_id}} {{name}}")], width=12)
    b.lines("Model FLOPs utilisation", [(f"hierad_job_mfu_ratio{name}", "{{job_id}} {{name}}")], unit="percentunit", width=12)
    b.lines("Restarts by reason", [("sum by (class) (hierad_job_restarts_total)", "{{class}}")], width=12)
    return b


def job():
    b = Board("job", "one job", "Where one job's time goes, and whether it learns.", job=True)
    of = '{job_id="$job"}'
    b.number("Done", f"hierad_job_step{of} / hierad_job_total_steps{of}", unit="percentunit")
    b.number("Loss", f"hierad_job_loss{of}", unit="none")
    b.number("Samples a second", f"hierad_job_samples_per_second{of}")
    b.number("ETA", f"hierad_job_eta_seconds{of}", unit="s")
    b.number("MFU", f"hierad_job_mfu_ratio{of}", unit="percentunit", about="The plan's operations over what the cards reach at best.")
    b.number("Times the floor", f"hierad_job_floor_ratio{of}", unit="none", about="Time of a step over the plan's least: 1 is as fast as can be.")
    b.phases("Step budget (share of the step, mean over ranks)",
             'avg by (phase) (rate(hierad_rank_phase_seconds_total{job_id="$job"}[$__rate_interval])'
             ' / ignoring (phase) group_left rate(hierad_rank_step_seconds_total{job_id="$job"}[$__rate_interval]))', width=12, height=9)
    b.phases("Newest step", 'hierad_job_phase_seconds{job_id="$job"}', unit="s", width=12, height=9)
    b.lines("Loss", [(f"hierad_job_loss{of}", "loss"), (f"hierad_job_best_eval_loss{of}", "best evaluation")], unit="none", width=12)
    b.lines("Gradient norm, learning rate", [(f"hierad_job_grad_norm{of}", "gradient norm"), (f"hierad_job_learning_rate{of}", "learning rate")],
            unit="none", width=12, log=True)
    b.lines("Step time a rank", [('rate(hierad_rank_step_seconds_total{job_id="$job"}[$__rate_interval])'
                                  ' / rate(hierad_rank_steps_total{job_id="$job"}[$__rate_interval])', "rank {{rank}}"),
                                 (f"hierad_job_step_floor_seconds{of}", "floor of the plan")], unit="s", width=12)
    b.lines("Memory a rank", [(f"hierad_rank_memory_bytes{of}", "rank {{rank}}")], unit="bytes", width=12)
    b.lines("Age of the newest checkpoint", [('hierad:job_checkpoint_age_seconds{job_id="$job"}', "age"),
                                             ('2 * hierad:job_checkpoint_interval_seconds{job_id="$job"}', "two intervals")], unit="s")
    b.lines("Time to save", [(f"hierad_job_checkpoint_seconds{of}", "newest save")], unit="s")
    b.lines("Skipped steps, attempts", [(f"hierad_job_nan_steps{of}", "NaN steps"), (f"hierad_job_attempts_total{of}", "attempts")])
    return b


def queue():
    b = Board("queue", "queue", "Who waits, for how long, and how hierad itself does.")
    b.number("In the queue", 'sum(hierad_jobs{state="queued"})')
    b.number("The first waits", "max(hierad_queue_wait_seconds)", unit="s")
    b.number("Free slots", 'sum(hierad_slots{state="free"})')
    b.number("Commit, 99 %", "max(hierad:commit_seconds:p99_5m)", unit="s")
    b.number("Decision, 99 %", "max(hierad:decision_seconds:p99_5m)", unit="s")
    b.number("Scrape", "max(hierad:scrape_seconds:mean5m)", unit="s")
    b.lines("Jobs by state", [("sum by (state) (hierad_jobs{state!~\"succeeded|failed|cancelled\"})", "{{state}}")], stack=True, width=12)
    b.lines("Ended jobs", [("sum by (state) (hierad_jobs{state=~\"succeeded|failed|cancelled\"})", "{{state}}")], width=12)
    b.lines("Wait of the first", [("hierad_queue_wait_seconds", "{{instance}}")], unit="s", width=12)
    b.lines("Slots", [("sum by (state) (hierad_slots)", "{{state}}")], stack=True, width=12)
    b.lines("Commit", [("histogram_quantile(0.5, sum by (le) (rate(hierad_commit_seconds_bucket[$__rate_interval])))", "median"),
                       ("histogram_quantile(0.99, sum by (le) (rate(hierad_commit_seconds_bucket[$__rate_interval])))", "99 %")], unit="s")
    b.lines("Decision", [("histogram_quantile(0.5, sum by (le) (rate(hierad_decision_seconds_bucket[$__rate_interval])))", "median"),
                         ("histogram_quantile(0.99, sum by (le) (rate(hierad_decision_seconds_bucket[$__rate_interval])))", "99 %")], unit="s")
    b.lines("hierad's memory", [("process_resident_memory_bytes{job=\"hierad\"}", "{{instance}}")], unit="bytes")
    return b


def nodes():
    b = Board("nodes", "nodes", "Nodes, their slots, their agents, the disk.")
    b.number("Nodes up", "sum(hierad_node_up)", width=3)
    b.number("Nodes lost", 'sum(hierad_nodes{state="lost"})', thresholds=[(1, "red")], width=3)
    b.number("GPUs usable", 'sum(hierad_node_slots{kind="cuda", state!~"lost|faulty"})', width=3)
    b.number("GPUs busy", 'sum(hierad_node_slots{kind="cuda", state="busy"}) / sum(hierad_node_slots{kind="cuda"})', unit="percentunit", width=3)
    b.number("Sessions of workers", 'sum(hierad_sessions{kind="worker"})', width=3)
    b.number("Disk free", "min(hierad_disk_free_bytes / hierad_disk_size_bytes)", unit="percentunit", width=3)
    b.number("GPUs out of use for a fault", 'sum(hierad_node_slots{kind="cuda", state="faulty"})', thresholds=[(1, "red")], width=6)
    b.lines("Busy slots a node", [('sum by (node) (hierad_node_slots{state="busy"})', "{{node}}")], width=12)
    b.lines("Slots of all nodes", [("sum by (kind, state) (hierad_node_slots)", "{{kind}} {{state}}")], stack=True, width=12)
    b.lines("Since the last report of an agent", [("hierad_node_report_age_seconds", "{{node}}")], unit="s", width=8)
    b.lines("Since the last report of a rank", [("max by (job_id) (hierad_rank_report_age_seconds)", "job {{job_id}}")], unit="s", width=8)
    b.lines("Disk free", [("hierad_disk_free_bytes", "{{folder}}")], unit="bytes", width=8)
    return b


def inputs():
    b = Board("input", "input", "Whether jobs wait for their data.")
    b.number("Jobs that wait more than 10 %", 'count(hierad:job_phase:ratio5m{phase="data_wait"} > 0.10) or vector(0)', thresholds=[(1, "orange")], width=6)
    b.number("Worst share", 'max(hierad:job_phase:ratio5m{phase="data_wait"})', unit="percentunit", width=6)
    b.number("Samples a second", "sum(rate(hierad_rank_samples_total[$__rate_interval]))", width=6)
    b.number("Samples left out", "sum(hierad_rank_skipped_samples_total)", width=6, thresholds=[(1, "orange")])
    b.lines("Waiting for input (share of the step)", [('hierad:job_phase:ratio5m{phase="data_wait"}', "job {{job_id}}")], unit="percentunit", width=12)
    b.lines("Waiting for input, worst ranks", [('topk(10, hierad:rank_phase:ratio5m{phase="data_wait"})', "job {{job_id}} rank {{rank}}")],
            unit="percentunit", width=12)
    b.lines("Samples a second a job", [("sum by (job_id) (rate(hierad_rank_samples_total[$__rate_interval]))", "job {{job_id}}")], width=12)
    b.lines("Unreadable samples left out", [("sum by (job_id) (hierad_rank_skipped_samples_total)", "job {{job_id}}")], width=12)
    b.lines("Read from files a second", [("sum by (job_id) (rate(hierad_rank_data_bytes_total[$__rate_interval]))", "job {{job_id}}")], unit="Bps", width=12)
    b.lines("Loops that wait for their loader (share of the time), worst ranks",
            [("topk(10, rate(hierad_rank_data_wait_seconds_total[$__rate_interval]))", "job {{job_id}} rank {{rank}}")], unit="percentunit", width=12)
    b.lines("Threads that read", [("sum by (job_id) (hierad_rank_data_readers)", "job {{job_id}}")], width=12)
    b.lines("Slowest sample of the attempt (hierctl describe names it)", [("max by (job_id) (hierad_rank_data_slowest_seconds)", "job {{job_id}}")], unit="s", width=12)
    return b


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 1)
    stale = []
    for board in (fleet(), job(), queue(), nodes(), inputs()):
        path = HERE / f"hierad-{board.key}.json"
        text = json.dumps(board.json(), indent=1) + "\n"
        if sys.argv[1:] and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not sys.argv[1:]:
            path.write_text(text)
    if stale:
        sys.exit(f"{', '.join(stale)}: not what deploy/grafana/generate.py writes; run it")


if __name__ == "__main__":
    main()
