"""Rules, alerts and dashboards on a real Prometheus that scrapes a live hierad: no query may be empty."""
import json
import subprocess
import sys
import unittest

import observe
from cluster import wait_for
from observe import ROOT


class RulesTest(unittest.TestCase):
    def promtool(self, *words):
        result = subprocess.run([observe.need("promtool", "prometheus"), *words], capture_output=True, text=True, cwd=ROOT / "deploy/prometheus")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_configuration_and_rules_are_legal(self):
        self.promtool("check", "config", "prometheus.yaml")
        self.promtool("check", "rules", "rules.yaml", "alerts.yaml")

    def test_alerts_fire_when_they_should(self):
        self.promtool("test", "rules", "alerts_test.yaml")

    def test_dashboards_are_what_the_generator_writes(self):
        result = subprocess.run([sys.executable, ROOT / "deploy/grafana/generate.py", "--check"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)


class LiveTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.c = c = observe.FakeCluster()
        cls.addClassCleanup(c.close)
        cls.prometheus = observe.Prometheus(c.folder, f"127.0.0.1:{c.metrics_port}")
        cls.addClassCleanup(cls.prometheus.close)
        c.add_node("gpu-2", 2, 20)
        cls.jobs = {name: c.submit_fake(name, ranks) for name, ranks in
                    (("good", 2), ("nan", 1), ("data", 1), ("comm", 1), ("explode", 1), ("oom", 1))}
        cls.jobs["short"] = c.submit_fake("short", steps=40)
        cls.jobs["waits"] = c.submit_fake("waits", ranks=12)
        wait_for(lambda: c.job(cls.jobs["oom"])["attempt"] == 2 and c.job(cls.jobs["oom"])["step"] > 150, "oom is lost once and goes on", 60)
        c.wait_state(cls.jobs["short"], "SUCCEEDED")
        wait_for(lambda: c.job(cls.jobs["good"])["checkpoint_ms"], "a checkpoint", 60)
        good = cls.jobs["good"]
        wait_for(lambda: cls.prometheus.query(f'hierad:job_checkpoint_interval_seconds{{job_id="{good}"}}')
                 and cls.prometheus.query(f'hierad_job_best_eval_loss{{job_id="{good}"}}')
                 and cls.prometheus.query(f'hierad_job_checkpoint_seconds{{job_id="{good}"}}'), "the rules have values", 60)

    def test_every_query_of_every_dashboard_has_data(self):
        boards = sorted((ROOT / "deploy/grafana").glob("hierad-*.json"))
        self.assertEqual(len(boards), 5)
        seen = 0
        for path in boards:
            board = json.loads(path.read_text())
            for title, _, expression in observe.panels(board, self.jobs["good"]):
                with self.subTest(board=path.name, panel=title, expression=expression):
                    found = self.prometheus.query(expression)
                    self.assertTrue(found, "empty")
                    self.assertTrue(any(s["value"][1] != "NaN" for s in found), f"nothing but NaN: {found[:3]}")
                    seen += 1
            names = {v["name"] for v in board["templating"]["list"]}
            self.assertIn("source", names)
            for variable in board["templating"]["list"]:
                if variable["type"] == "query":
                    self.assertEqual(variable["definition"], "label_values(hierad_job_info, job_id)")
        self.assertGreater(seen, 50)

    def test_rules_are_healthy_and_alerts_fire(self):
        for group in self.prometheus.api("rules")["groups"]:
            for rule in group["rules"]:
                self.assertEqual(rule["health"], "ok", f"{rule['name']}: {rule.get('lastError')}")
        wanted = {("HieradLossNotFinite", str(self.jobs["nan"])), ("HieradStepsSkipped", str(self.jobs["nan"])),
                  ("HieradDataBound", str(self.jobs["data"])), ("HieradSamplesLeftOut", str(self.jobs["data"])), ("HieradCommExposed", str(self.jobs["comm"])),
                  ("HieradLossExploding", str(self.jobs["explode"]))}
        wait_for(lambda: wanted <= self.prometheus.firing(), lambda: f"{wanted} fire; there fire {self.prometheus.firing()}", 60)
        on_good = {name for name, job in self.prometheus.firing() if job == str(self.jobs["good"])}
        self.assertEqual(on_good, set(), "a good job has no alert")

    def test_values_are_those_of_hierctl(self):
        good = self.jobs["good"]
        of = f'{{job_id="{good}"}}'
        job = self.c.job(good)
        self.assertEqual(self.prometheus.value(f"hierad_job_ranks{of}"), 2)
        self.assertGreaterEqual(job["step"] + 1000, self.prometheus.value(f"hierad_job_step{of}"))
        self.assertAlmostEqual(self.prometheus.value(f"hierad_job_step_seconds{of}"), 0.05, 6)
        self.assertAlmostEqual(self.prometheus.value(f'sum(hierad_job_phase_seconds{of})'), 0.05, 6)
        ratios = {s["metric"]["phase"]: float(s["value"][1]) for s in self.prometheus.query(f"hierad:job_phase:ratio5m{of}")}
        self.assertAlmostEqual(sum(ratios.values()), 1, 2)
        self.assertAlmostEqual(ratios["data_wait"], 0.02, 2)
        self.assertEqual(self.prometheus.value(f'hierad_job_restarts_total{{job_id="{self.jobs["oom"]}", class="cuda_oom"}}'), 1)
        self.assertEqual(self.prometheus.value(f'hierad_job_info{{job_id="{self.jobs["short"]}", state="succeeded"}}'), 1)
        waits = self.c.job(self.jobs["waits"])
        self.assertEqual(waits["state"], "QUEUED")
        self.assertGreater(self.prometheus.value("hierad_queue_wait_seconds"), 0)
        alerts = " ".join(self.c.job(self.jobs["data"])["alerts"])
        self.assertIn("waits for input", alerts)
        # One state a job at any moment.
        self.assertEqual({float(s["value"][1]) for s in self.prometheus.query("count by (job_id) (hierad_job_info)")}, {1.0})

    def test_y_a_faulty_card_is_an_alert(self):
        self.assertNotIn(("HieradGpuFaulty", None), self.prometheus.firing())
        self.c.add_node("gpu-bad", 2, 20, faulty=1)
        wait_for(lambda: ("HieradGpuFaulty", None) in self.prometheus.firing(), lambda: f"a card is faulty; {self.prometheus.firing()}", 60)
        self.assertEqual(self.prometheus.value('hierad_node_slots{node="gpu-bad", kind="cuda", state="faulty"}'), 1)
        self.assertEqual(self.prometheus.value('hierad_slots{state="faulty"}'), 1)

    def test_z_a_lost_node_is_an_alert(self):
        self.c.remove_node("gpu-2")
        wait_for(lambda: ("HieradGpuLost", None) in self.prometheus.firing(), lambda: f"GPUs are lost; {self.prometheus.firing()}", 60)


if __name__ == "__main__":
    unittest.main(verbosity=2)
