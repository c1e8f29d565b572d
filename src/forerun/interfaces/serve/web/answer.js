// @ts-check
// The answer: time against memory of all plans, gains of single choices, the table of plans, the scaling curve.

import { byId, call, make, showError, stream } from "./api.js";
import { draw, legend } from "./scatter.js";
import { curve } from "./figures.js";
import { dollars, gib, percent, rate, seconds } from "./format.js";
import { heading } from "./parts.js";

/** @typedef {{question: any, answer: any, rows: any[] | null, n: number, row: number | null, pin: number | null,
 *   choose: (place: any) => void, apply: (fixed: Record<string, string>) => void}} State */

const COLUMNS = /** @type {[string, string, (place: any) => string][]} */ ([
  ["step_time_s", "step time", (p) => (p.step_time_s ? seconds(p.step_time_s) : p.least_s ? `≥ ${seconds(p.least_s)}` : "")],
  ["tokens_per_s_per_gpu", "tokens/s/GPU", (p) => rate(p.tokens_per_s_per_gpu)],
  ["mfu", "MFU", (p) => percent(p.mfu)],
  ["peak_reserved_gib", "peak, GiB", (p) => (p.peak_reserved_gib ? gib(p.peak_reserved_gib) : p.least_gib ? `≥ ${gib(p.least_gib)}` : "")],
  ["exposed_comm_s", "exposed comm.", (p) => (p.step_time_s ? percent(p.exposed_comm_s / p.step_time_s) : "")],
  ["bubble_s", "bubble", (p) => (p.step_time_s ? percent(p.bubble_s / p.step_time_s) : "")],
  ["dollars_per_billion_tokens", "$ / 10⁹ tokens", (p) => dollars(p.dollars_per_billion_tokens)],
]);

/** A limit that is this many times higher than what the plans need is not drawn. */
const FAR = 2.5;

/** @param {number[]} values */
function largest(values) {
  return values.reduce((most, value) => Math.max(most, value), 0);
}

/** @type {AbortController | null} */
let scaling = null;

/** Makes the places of the answer, once. */
/** @param {State} state */
export function makeAnswer(state) {
  byId("found").replaceChildren(
    make("div", { id: "summary" }),
    make("h3", { text: "Time against memory" }),
    make("div", { id: "scatter-legend" }),
    make("div", { id: "scatter", class: "scatter" }),
    make("div", { class: "row" }, make("button", { type: "button", id: "scatter-png", text: "Save as PNG" }),
      make("small", { text: "Every point is a plan; click it to choose it. Drag to zoom in, double-click to zoom out." })),
    make("div", { id: "choices" }),
    make("h3", { id: "plans-title", text: "Plans" }),
    make("form", { id: "filter", class: "row" },
      make("label", { for: "wanted", text: "Filter" }),
      make("input", { type: "text", id: "wanted", placeholder: "tp=2,pp=4", "aria-describedby": "filter-about" }),
      make("label", { for: "state", text: "Show" }),
      make("select", { id: "state" }, ...["all", "fits", "does not fit", "not simulated"].map((text) => make("option", { text, value: text }))),
      make("button", { type: "submit", text: "Filter" })),
    make("small", { id: "filter-about", text: "A filter only selects rows. It changes neither the global batch nor the numerics." }),
    make("div", { id: "table" }),
    make("div", { class: "row" }, make("button", { type: "button", id: "csv", text: "All plans as CSV" }),
      make("button", { type: "button", id: "command", text: "The search as a command", onclick: () => showCommand(state) })),
    make("pre", { id: "search-command", tabindex: 0, hidden: true, "aria-label": "command of the search" }),
    make("details", { id: "scaling-box" }, make("summary", { text: "Scaling and cost over the number of GPUs" }), make("div", { id: "scaling" })),
    make("details", {}, make("summary", { text: "Why the others were left out" }), make("div", { id: "left-out" })),
  );
  byId("filter").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    filter(state);
  });
  byId("state").addEventListener("change", () => filter(state));
  byId("scaling-box").addEventListener("toggle", () => byId("scaling-box").open && scale(state));
}

/** @param {State} state */
async function showCommand(state) {
  try {
    byId("search-command").textContent = (await call("command", state.question)).command;
    byId("search-command").hidden = false;
  } catch (error) {
    showError(error);
  }
}

/** @param {State} state */
async function filter(state) {
  try {
    const wanted = byId("wanted").value, status = byId("state").value;
    if (!wanted && status === "all") state.rows = null;
    else {
      const found = await call("rows", { question: state.question, wanted, status });
      [state.rows, state.n] = [found.rows, found.n];
    }
    showError("");
    showTable(state);
  } catch (error) {
    showError(error);
  }
}

/** Shows all that is known of the answer. */
/** @param {State} state */
export function showAnswer(state) {
  const answer = state.answer;
  summary(answer);
  if (answer.points) {
    showScatter(state);
    showChoices(state);
    leftOut(answer);
  }
  showTable(state);
}

/** @param {any} answer */
function summary(answer) {
  const best = (answer.top || [])[0];
  const box = byId("summary");
  if (!answer.counts) {
    box.replaceChildren(make("p", { class: "note", text: best ? "First plans; the best one is not proved yet." : "Searching." }));
    return;
  }
  const counts = answer.counts;
  const words = `${counts.considered.toLocaleString("en")} plans; ${answer.proof}. ${counts.ok} simulated plans fit, ` +
    `${counts.out_of_memory.toLocaleString("en")} do not.`;
  box.replaceChildren(make("p", best && best.fits
    ? { text: words } : { class: "warning", text: `Nothing fits. ${answer.nearest_miss || ""} ${words}` }));
}

/** @param {State} state */
export function showScatter(state) {
  const answer = state.answer, points = answer.points;
  if (!points) return;
  const { simulated, bounded } = points;
  const longest = Math.max(0, ...simulated.s, ...bounded.s.slice(0, 1));
  const [unit, size] = longest >= 1 ? ["s", 1] : longest >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6];
  const of = (/** @type {number[]} */ rows) => rows.map((i) => ({ gib: simulated.gib[i], s: simulated.s[i] / Number(size), row: simulated.row[i], words: simulated.words[i] }));
  const every = simulated.row.map((/** @type {number} */ _, /** @type {number} */ i) => i);
  const fits = of(every.filter((/** @type {number} */ i) => simulated.fits[i]));
  const large = of(every.filter((/** @type {number} */ i) => !simulated.fits[i]));
  const text = (/** @type {any[]} */ some) => (/** @type {number} */ i) => `${some[i].words}\n${seconds(some[i].s * Number(size))}, ${gib(some[i].gib)} GiB`;
  const series = /** @type {any[]} */ ([]);
  const rows = /** @type {(number[] | null)[]} */ ([]);
  const add = (/** @type {any} */ one, /** @type {number[] | null} */ own) => (series.push(one), rows.push(own));
  if (bounded.row.length)
    add({ label: "lower bounds, not simulated", colour: "#8a8f98", kind: "points", faint: true, size: 2.5,
      x: bounded.gib, y: bounded.s.map((/** @type {number} */ s) => s / Number(size)),
      text: (/** @type {number} */ i) => `not simulated\nat least ${seconds(bounded.s[i])}, ${gib(bounded.gib[i])} GiB` }, bounded.row);
  const times = [...fits, ...large].map((each) => each.s).concat(bounded.s.map((/** @type {number} */ s) => s / Number(size)));
  const low = Math.min(...times) / 1.15, high = Math.max(...times) * 1.15;
  const needed = Math.max(1e-3, ...[...fits, ...large].map((p) => p.gib), largest(bounded.gib));
  const isFar = answer.memory_limit_gib > FAR * needed;
  const most = isFar ? 1.08 * needed : Math.min(1.08 * needed, 1.4 * answer.memory_limit_gib);
  const beyond = isFar ? ", is beyond the plot" : "";
  add({ label: `limit of memory, ${gib(answer.memory_limit_gib)} GiB${beyond}`, colour: "--ink", kind: "line", dash: [7, 5], quiet: true,
    x: [answer.memory_limit_gib, answer.memory_limit_gib], y: [high / low > 4 ? low : 0, high] }, null);
  const best = fits.find((each) => answer.top.length && each.row === answer.top[0].row);
  if (best) {
    const top = answer.top[0];
    add({ label: "80 % band of the best", colour: "--bar", kind: "line", quiet: true, x: [best.gib, best.gib],
      y: [top.step_time_low_s / Number(size), top.step_time_high_s / Number(size)] }, null);
  }
  if (large.length) add({ label: "does not fit, lower bound of time", colour: "--bar-warn", kind: "points", symbol: "cross", x: large.map((p) => p.gib), y: large.map((p) => p.s), text: (/** @type {number} */ i) => text(large)(i).replace("\n", "\nat least ") }, large.map((p) => p.row));
  if (answer.front) {
    const places = answer.front.places;
    add({ label: "Pareto front", colour: "#009E73", kind: "line", shape: "vh", quiet: true,
      x: places.map((/** @type {any} */ p) => p.peak_reserved_gib), y: places.map((/** @type {any} */ p) => p.step_time_s / Number(size)) }, null);
    const front = places.map((/** @type {any} */ p) => ({ gib: p.peak_reserved_gib, s: p.step_time_s / Number(size), words: p.words }));
    add({ label: "Pareto front", colour: "#009E73", kind: "points", symbol: "ring", size: 9, x: front.map((/** @type {any} */ p) => p.gib), y: front.map((/** @type {any} */ p) => p.s), text: text(front) }, places.map((/** @type {any} */ p) => p.row));
  }
  if (fits.length) add({ label: "fits", colour: "--bar", kind: "points", x: fits.map((p) => p.gib), y: fits.map((p) => p.s), text: text(fits) }, fits.map((p) => p.row));
  /** The bounds of a plan that was not simulated. */
  const least = (/** @type {number | null} */ row) => {
    const i = row === null ? -1 : bounded.row.indexOf(row);
    return i < 0 ? null : { gib: bounded.gib[i], s: bounded.s[i] / Number(size) };
  };
  for (const [row, label] of /** @type {[number | null, string][]} */ ([[state.row, "chosen"], [state.pin, "pinned"]])) {
    const found = [...fits, ...large].find((each) => each.row === row) || least(row);
    if (found) add({ label, colour: "--ink", kind: "points", symbol: label === "chosen" ? "ring" : "square", size: 14, quiet: true, x: [found.gib], y: [found.s] }, null);
  }
  const names = new Set();
  byId("scatter-legend").replaceChildren(legend(series.filter((each) => !names.has(each.label) && names.add(each.label))));
  const made = draw(byId("scatter"), {
    series, name: "plans", height: 340,
    about: `Step time and memory of ${simulated.row.length} simulated plans and the least of ${bounded.row.length} others; the limit is ${gib(answer.memory_limit_gib)} GiB`,
    x: { label: "peak of reserved memory of a GPU, GiB", range: [0, Math.max(most, isFar ? 0 : 1.05 * answer.memory_limit_gib)] },
    y: { label: `time of a step, ${unit}`, log: high / low > 4, range: [high / low > 4 ? low : 0, high] },
    pick: (number, i) => {
      const own = rows[number];
      if (own) state.choose({ row: own[i] });
    },
  });
  byId("scatter-png").onclick = () => made.png();
}

/** @param {State} state */
function showChoices(state) {
  const rows = state.answer.choices;
  if (!rows.length) {
    byId("choices").replaceChildren();
    return;
  }
  const keep = make("input", { type: "checkbox", id: "keep", checked: true });
  const list = make("ul", { class: "choices" });
  const show = () => list.replaceChildren(...rows
    .filter((/** @type {any} */ each) => !(keep.checked && each.changes_numerics))
    .map((/** @type {any} */ each) => make("li", {}, make("span", { text: each.words }),
      make("button", { type: "button", text: "Apply", "aria-label": `Apply: ${each.words}`, onclick: () => state.apply(each.fixed) }))));
  keep.addEventListener("change", show);
  show();
  byId("choices").replaceChildren(make("h3", { text: "Gains of single choices" }),
    make("div", { class: "row" }, keep, make("label", { for: "keep", text: "Only choices that change neither the global batch nor the numerics" })), list);
}

/** @param {State} state */
export function showTable(state) {
  const rows = state.rows || state.answer.top || [];
  const body = make("tbody");
  const place = (/** @type {any} */ each) => {
    const name = make("button", { type: "button", class: "plain", text: each.words, onclick: () => state.choose(each) });
    const more = [each.stack, ...(each.status === "fits" ? [] : [each.reason || each.status])].join("; ");
    return make("tr", { "aria-current": each.row !== null && each.row === state.row ? "true" : null },
      make("th", { scope: "row", class: "plan" }, name, make("br"), make("small", { text: more })),
      ...COLUMNS.map(([, , text]) => make("td", { class: "number", text: text(each) })));
  };
  const fillWith = (/** @type {any[]} */ some) => body.replaceChildren(...some.map(place));
  const sorter = (/** @type {(each: any) => any} */ key) => (/** @type {boolean} */ down) => {
    const value = (/** @type {any} */ each) => key(each) ?? Infinity;
    fillWith([...rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1)));
  };
  const own = (/** @type {string} */ name) => (/** @type {any} */ each) =>
    name.endsWith("_comm_s") || name === "bubble_s" ? each[name] / each.step_time_s
      : each[name] ?? (name === "step_time_s" ? each.least_s : name === "peak_reserved_gib" ? each.least_gib : undefined);
  fillWith(rows);
  const head = make("tr", {}, heading("plan", false, sorter((each) => each.words)),
    ...COLUMNS.map(([name, title]) => heading(title, true, sorter(own(name)))));
  const n = state.rows ? state.n : rows.length;
  const caption = state.rows ? `${n.toLocaleString("en")} plans match; ${rows.length} are listed`
    : state.answer.proof ? `The best ${rows.length} plans that fit and were simulated` : "First plans, not proved yet";
  byId("table").replaceChildren(make("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-labelledby": "plans-title" },
    make("table", {}, make("caption", { text: caption }), make("thead", {}, head), body)));
}

/** @param {any} answer */
function leftOut(answer) {
  const rules = Object.entries(answer.impossible).map(([rule, n]) =>
    make("li", { text: `${Number(n).toLocaleString("en")} impossible: ${rule}, for example: ${answer.impossible_examples[rule] || ""}` }));
  const causes = Object.entries(answer.out_of_memory).map(([name, n]) =>
    make("li", { text: `${Number(n).toLocaleString("en")} do not fit: ${name} is the largest part` }));
  const front = answer.front ? [make("li", { text: `The Pareto front is ${answer.front.certainty}.` })] : [];
  byId("left-out").replaceChildren(make("ul", { class: "lines" },
    make("li", { text: `${answer.counts.skipped.toLocaleString("en")} not simulated: a bound shows that they are worse` }), ...causes, ...rules, ...front));
}

/** Stops the search of the scaling curve. */
export function endScaling() {
  if (scaling) scaling.abort();
}

/** @param {State} state */
async function scale(state) {
  endScaling();
  scaling = new AbortController();
  const box = byId("scaling");
  box.replaceChildren(make("p", { class: "note", text: "Searching each number of GPUs." }));
  try {
    await stream("scale", state.question, (event) => {
      if (event.kind === "scaling") showScaling(box, event);
      else if (event.kind === "error") throw new Error(event.message);
      else if (event.kind === "waiting") box.replaceChildren(make("p", { class: "note", text: "Another search is running; this one comes next." }));
      else if (event.kind === "superseded") box.append(make("p", { class: "note", text: "A newer question replaced it; open this again." }));
    }, scaling.signal);
  } catch (error) {
    if (!(error instanceof DOMException)) box.replaceChildren(make("p", { class: "warning", text: error instanceof Error ? error.message : String(error) }));
  }
}

/**
 * @param {HTMLElement} box
 * @param {any} event
 */
function showScaling(box, event) {
  const points = event.points.filter((/** @type {any} */ each) => each.best);
  const chart = (/** @type {string} */ label, /** @type {(p: any) => number} */ value, /** @type {string} */ colour) => {
    const x = points.map((/** @type {any} */ p) => p.n_gpus), y = points.map(value);
    const texts = x.map((/** @type {number} */ n, /** @type {number} */ i) =>
      `${n} GPUs: ${y[i].toLocaleString("en", { maximumSignificantDigits: 4 })}<br>${points[i].best.words}`);
    return curve({ label, colour, x, y, texts, x_label: "number of GPUs" });
  };
  const priced = points.every((/** @type {any} */ p) => p.best.dollars_per_billion_tokens !== null);
  const rows = event.points.map((/** @type {any} */ p) => make("tr", {}, make("th", { scope: "row", class: "number", text: p.n_gpus.toLocaleString("en") }),
    make("td", { class: "number", text: p.best ? seconds(p.best.step_time_s) : "" }), make("td", { class: "number", text: rate(p.tokens_per_s) }),
    make("td", { class: "number", text: percent(p.efficiency) }), make("td", { class: "number", text: p.best ? dollars(p.best.dollars_per_billion_tokens) : "" }),
    make("td", { class: "plan", text: p.best ? p.best.words : p.reason })));
  const head = ["GPUs", "step time", "tokens/s", "efficiency", "$ / 10⁹ tokens", "best plan"].map((text, i) => make("th", { scope: "col", class: i < 5 ? "number" : null, text }));
  box.replaceChildren(
    make("p", { class: "note", text: event.done ? "The best plan of each number of GPUs, with the same global batch." : "Searching more numbers of GPUs." }),
    ...(points.length ? [chart("tokens/s of all GPUs", (p) => p.tokens_per_s, "#0072B2")] : []),
    ...(points.length && priced ? [chart("dollars per billion tokens", (p) => p.best.dollars_per_billion_tokens, "#D55E00")] : []),
    make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "scaling" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))));
}

