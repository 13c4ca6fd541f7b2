"use strict";
// Asks hierad every two seconds and shows what it says. Texts go in as text, never as markup.
const byId = (id) => document.getElementById(id);
const PHASES = ["data_wait", "forward", "backward", "comm", "optimizer", "other"];
const NAMES = {data_wait: "waiting for input", forward: "forward", backward: "backward", comm: "exposed all-reduce", optimizer: "optimizer", other: "other"};
const ENDED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
let jobs = [], chosen = null, busy = false, readingLog = false;

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}
function setText(element, text) { if (element.textContent !== text) element.textContent = text; }

// Numbers that are not finite come as the strings "NaN", "Infinity", "-Infinity".
const finite = (value) => typeof value === "number" && Number.isFinite(value);
function number(value) {
  if (value === null || value === undefined) return "–";
  if (!finite(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e6 || (size < 1e-3 && size > 0) ? value.toExponential(2) : size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}
function duration(s) {
  if (!finite(s) || s <= 0) return "–";
  if (s < 60) return Math.ceil(s) + " s";
  if (s < 3600) return Math.floor(s / 60) + " min";
  if (s < 86400) return Math.floor(s / 3600) + " h " + String(Math.floor(s % 3600 / 60)).padStart(2, "0") + " min";
  return Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h";
}
function bytes(n) { return n > 0 ? (n >= 2 ** 30 ? (n / 2 ** 30).toFixed(1) + " GiB" : Math.round(n / 2 ** 20) + " MiB") : "–"; }

function fillBudget(element, budget) {
  if (element.childElementCount !== PHASES.length) element.replaceChildren(...PHASES.map((phase) => {
    const part = make("i");
    part.style.background = `var(--${phase})`;
    return part;
  }));
  PHASES.forEach((phase, i) => {
    const share = budget ? budget[phase] || 0 : 0, part = element.children[i];
    const width = (100 * share).toFixed(1) + "%";
    if (part.style.width !== width) part.style.width = width;
    part.title = `${NAMES[phase]}: ${(100 * share).toFixed(1)} %`;
  });
}
function fillKey(element, budget) {
  element.replaceChildren();
  for (const phase of PHASES) {
    const box = make("i");
    box.style.background = `var(--${phase})`;
    element.append(box, NAMES[phase] + (budget ? ` ${(100 * (budget[phase] || 0)).toFixed(1)} %` : ""));
  }
}

// The list: rows are kept by job and only what changed is touched, so a thousand of them stay quick.
const rows = new Map();
function rowOf(id) {
  let row = rows.get(id);
  if (row) return row;
  const line = make("tr");
  const cells = ["n", "", "state", "", "n", "n", "n", ""].map((name) => line.appendChild(make("td", name)));
  const progress = make("span", "progress"), full = make("i"), percent = make("span");
  progress.append(full);
  cells[3].append(progress, percent);
  const budget = make("div", "budget");
  cells[7].append(budget);
  line.addEventListener("click", () => choose(id));
  row = {line, cells, full, percent, budget};
  rows.set(id, row);
  return row;
}
function fillRow(job) {
  const {line, cells, full, percent, budget} = rowOf(job.id);
  setText(cells[0], String(job.id));
  setText(cells[1], job.name);
  cells[1].title = job.name;
  setText(cells[2], job.state + (job.alerts ? " !" : ""));
  cells[2].className = "state " + job.state;
  const done = job.total_steps > 0 ? Math.min(1, job.step / job.total_steps) : 0;
  full.style.width = (100 * done).toFixed(1) + "%";
  setText(percent, job.total_steps > 0 ? (100 * done).toFixed(0) + "%" : "–");
  setText(cells[4], number(job.loss));
  setText(cells[5], job.samples_per_s > 0 ? number(job.samples_per_s) : "–");
  setText(cells[6], duration(job.eta_s));
  budget.style.visibility = job.budget ? "visible" : "hidden";
  if (job.budget) fillBudget(budget, job.budget);
  line.classList.toggle("chosen", chosen === job.id);
}
function showJobs() {
  const words = byId("filter").value.toLowerCase(), live = byId("live").checked;
  const shown = jobs.filter((job) => (!live || !ENDED.has(job.state)) &&
    (!words || String(job.id) === words || job.name.toLowerCase().includes(words) || job.state.toLowerCase().includes(words)));
  shown.forEach(fillRow);
  const body = byId("rows"), lines = shown.map((job) => rows.get(job.id).line);
  if (body.childElementCount !== lines.length || lines.some((line, i) => body.children[i] !== line)) body.replaceChildren(...lines);
  byId("none").hidden = lines.length > 0;
  const there = new Set(jobs.map((job) => job.id));
  for (const id of rows.keys()) if (!there.has(id)) rows.delete(id);
}

function showTotals(totals, onlyOf) {
  const parts = [];
  for (const [state, count] of Object.entries(totals.jobs)) if (count > 0) parts.push([count, state.toLowerCase()]);
  parts.push([`${totals.slots_busy} of ${totals.slots}`, "slots busy"]);
  if (totals.slots_faulty) parts.push([totals.slots_faulty, "out of use for a fault"]);
  if (onlyOf) parts.push([onlyOf, "sees its own jobs"]);
  byId("totals").replaceChildren(...parts.flatMap(([count, what], i) => [i ? ", " : "", make("b", "", String(count)), " " + what]));
}
function showNodes(nodes) {
  byId("nodes").replaceChildren(...nodes.map((node) => {
    const line = make("div", "node");
    line.append(make("b", node.connected ? "" : "lost", node.name + (node.connected ? "" : " (lost)")));
    for (const slot of node.slots) {
      const box = make("span", "slot" + (slot.job_id ? " busy" : "") + (slot.fault ? " faulty" : ""), slot.job_id ? `${slot.job_id}.${slot.rank}` : slot.fault ? "faulty" : "free");
      box.title = `${slot.id} ${slot.model}` + (slot.fault ? `\nout of use: ${slot.fault}; then hierctl undrain ${node.name}` : "");
      if (jobs.some((job) => job.id === slot.job_id)) box.addEventListener("click", () => choose(slot.job_id));
      line.append(box);
    }
    return line;
  }));
}

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
function drawLoss(points) {
  const chart = byId("chart"), good = points.filter((p) => finite(p.loss));
  chart.replaceChildren();
  if (!good.length) {
    chart.append(svg("text", {x: 360, y: 110, "text-anchor": "middle"}, points.length ? "no finite loss" : "no steps yet"));
    return;
  }
  const first = points[0].step, last = points[points.length - 1].step;
  let low = Infinity, high = -Infinity;
  for (const p of good) { low = Math.min(low, p.loss); high = Math.max(high, p.loss); }
  if (high === low) { high += Math.abs(high) / 2 + 1e-12; low -= Math.abs(low) / 2 + 1e-12; }
  const x = (step) => 56 + 652 * (step - first) / Math.max(1, last - first), y = (loss) => 12 + 180 * (high - loss) / (high - low);
  for (const share of [0, 0.5, 1]) {
    const value = low + share * (high - low);
    chart.append(svg("line", {x1: 56, x2: 708, y1: y(value), y2: y(value), stroke: "var(--line)"}),
                 svg("text", {x: 50, y: y(value) + 4, "text-anchor": "end"}, number(value)));
  }
  chart.append(svg("text", {x: 56, y: 212}, String(first)), svg("text", {x: 708, y: 212, "text-anchor": "end"}, "step " + last));
  let path = "", down = false;
  for (const p of points) {
    if (finite(p.loss)) { path += (down ? "L" : "M") + x(p.step).toFixed(1) + " " + y(p.loss).toFixed(1); down = true; } else down = false;
    if (!finite(p.loss)) chart.append(svg("line", {x1: x(p.step), x2: x(p.step), y1: 190, y2: 198, stroke: "var(--red)"}));
  }
  chart.append(svg("path", {d: path, fill: "none", stroke: "var(--blue)", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke"}));
}
function showJob(job, points) {
  byId("title").textContent = `Job ${job.id}: ${job.name}`;
  byId("message").textContent = job.state + (job.reason ? `, ${job.reason}` : "") + (job.message ? `: ${job.message}` : "");
  byId("alerts").replaceChildren(...job.alerts.map((alert) => make("li", "", alert)));
  const facts = [["Step", job.step + (job.total_steps ? ` of ${job.total_steps}` : "")], ["Epoch", number(job.epoch)], ["Loss", number(job.loss)],
    ["Gradient norm", number(job.grad_norm)], ["Learning rate", number(job.lr)], ["Samples/s", job.samples_per_s ? number(job.samples_per_s) : "–"],
    ["Left", duration(job.eta_s)], ["Attempt", String(job.attempt)], ["NaN steps", String(job.nan_steps)], ["Best evaluation", number(job.best_eval_loss)],
    ["Newest checkpoint", job.checkpoint_ms ? new Date(job.checkpoint_ms).toLocaleTimeString() : "–"], ["Data", job.data === "synthetic" ? "synthetic (random numbers)" : job.data],
    ["Submitted by", job.submitter]];
  byId("facts").replaceChildren(...facts.map(([name, value]) => { const cell = make("div"); cell.append(make("span", "", name), value); return cell; }));
  drawLoss(points);
  byId("step_s").textContent = job.step_s ? `(${number(1000 * job.step_s)} ms a step)` : "";
  byId("budget").style.visibility = job.budget ? "visible" : "hidden";
  fillBudget(byId("budget"), job.budget);
  fillKey(byId("budget_key"), job.budget);
  byId("ranks").replaceChildren(...job.ranks.map((rank) => {
    const line = make("tr");
    line.append(make("td", "n", String(rank.rank)), make("td", "", `${rank.slot_id} on ${rank.node}`), make("td", "", rank.phase), make("td", "n", String(rank.step)),
                make("td", "n", bytes(rank.memory_bytes)), make("td", "", rank.waiting_in));
    return line;
  }));
  const select = byId("log_rank"), count = Math.max(1, job.ranks_wanted);
  while (select.childElementCount < count) select.append(make("option", "", String(select.childElementCount)));
  while (select.childElementCount > count) select.lastChild.remove();
}
function showLog(text) {
  const log = byId("log"), atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
  if (log.textContent === text) return;
  log.textContent = text;
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
// A log may lie on a node that is slow to answer: nothing else waits for it.
async function refreshLog(id) {
  if (readingLog) return;
  readingLog = true;
  const rank = Number(byId("log_rank").value || 0);
  try {
    const log = await ask(`api/jobs/${id}/log?rank=${rank}`);
    if (chosen === id && rank === Number(byId("log_rank").value || 0)) showLog(log.text);
  } catch (error) {   // it is asked for again
  } finally {
    readingLog = false;
  }
}
async function refresh() {
  if (busy || document.hidden) return;
  busy = true;
  try {
    const overview = await ask("api/overview");
    jobs = overview.jobs;
    showTotals(overview.totals, overview.only_of);
    showJobs();
    showNodes(overview.nodes);
    if (chosen !== null) {
      const id = chosen;
      refreshLog(id);
      const [job, metrics] = await Promise.all([ask(`api/jobs/${id}`), ask(`api/jobs/${id}/metrics`)]);
      if (chosen === id) showJob(job, metrics.points);
    }
    byId("away").hidden = true;
    document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
  } catch (error) {
    byId("away").hidden = false;
  } finally {
    busy = false;
  }
}
function choose(id) {
  chosen = id;
  byId("job").hidden = id === null;
  document.querySelector("main").classList.toggle("open", id !== null);
  history.replaceState(null, "", id === null ? location.pathname : `#${id}`);
  byId("log_rank").value = "0";
  showLog("");
  showJobs();
  refresh();
}

byId("filter").addEventListener("input", showJobs);
byId("live").addEventListener("change", showJobs);
byId("log_rank").addEventListener("change", () => { showLog(""); refresh(); });
byId("close").addEventListener("click", () => choose(null));
document.addEventListener("visibilitychange", refresh);
fillKey(byId("key"), null);
if (/^#\d+$/.test(location.hash)) choose(Number(location.hash.slice(1)));
refresh();
setInterval(refresh, 2000);
