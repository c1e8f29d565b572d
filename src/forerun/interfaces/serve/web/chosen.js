// @ts-check
// The chosen plan: its figures, where it stands, its neighbours, its step in detail, and a second plan beside it.

import { byId, call, download, make, showError } from "./api.js";
import { dollars, gib, percent, rate, seconds } from "./format.js";
import { figures, sections } from "./parts.js";

/** @typedef {import("./answer.js").State} State */

const ROWS = /** @type {[string, (p: any) => string, (p: any) => number | null][]} */ ([
  ["step time", (p) => seconds(p.step_time_s), (p) => p.step_time_s],
  ["tokens/s of a GPU", (p) => rate(p.tokens_per_s_per_gpu), (p) => p.tokens_per_s_per_gpu],
  ["MFU", (p) => percent(p.mfu), (p) => p.mfu],
  ["peak memory, GiB", (p) => gib(p.peak_reserved_gib), (p) => p.peak_reserved_gib],
  ["exposed communication", (p) => seconds(p.exposed_comm_s), (p) => p.exposed_comm_s],
  ["waiting for other stages", (p) => seconds(p.bubble_s), (p) => p.bubble_s],
  ["dollars per billion tokens", (p) => dollars(p.dollars_per_billion_tokens), (p) => p.dollars_per_billion_tokens],
]);

let newest = 0;
/** @type {any} */
let pinned = null;
/** The question whose plan is pinned: a row is another plan in another space. */
let pinnedIn = "";

/**
 * Shows a plan: its figures at once, its details as they come.
 * @param {State} state
 * @param {any} place
 * @param {any} tools
 */
export async function showPlan(state, place, tools) {
  const mine = ++newest;
  const about = { question: state.question, ...(typeof place.row === "number" ? { row: place.row } : { plan: place.plan }) };
  try {
    const found = await call("plan", about);
    if (mine !== newest) return;
    showError("");
    const extra = make("div"), details = make("div", {}, make("p", { class: "note", text: "Simulating every kernel." }));
    byId("plan").replaceChildren(...head(found, state, about, tools), beside(found, state), extra, details);
    const [page, near] = await Promise.all([call("details", about), call("neighbours", about).catch(() => null)]);
    if (mine !== newest) return;
    if (near) extra.replaceChildren(neighbours(near.neighbours, state));
    details.replaceChildren(...sections(page.parts.filter((/** @type {any} */ part, /** @type {number} */ i) => i > 0 || part.type !== "figures"), 0));
    openTimeline(details);
  } catch (error) {
    if (mine === newest) showError(error);
  }
}

/** @param {HTMLElement} box */
function openTimeline(box) {
  for (const each of box.querySelectorAll("details")) {
    const title = each.querySelector("summary");
    if (title && ["Where the time goes", "Communication", "Timeline of a step", "Memory"].includes(title.textContent || "")) each.open = true;
  }
}

/**
 * @param {any} found
 * @param {State} state
 * @param {any} about
 * @param {any} tools
 * @returns {any[]}
 */
function head(found, state, about, tools) {
  const band = `80 %: ${seconds(found.step_time_low_s)} to ${seconds(found.step_time_high_s)}`;
  const limit = `of ${gib(found.memory_limit_gib)} GiB: ${found.fits ? "fits" : "does not fit"}${found.fit_in_doubt ? ", in doubt" : ""}`;
  /** @type {[string, string, string][]} */
  const entries = [["step time", seconds(found.step_time_s), band],
    ["tokens/s of a GPU", rate(found.tokens_per_s_per_gpu), `MFU ${percent(found.mfu)}, HFU ${percent(found.hfu)}`],
    ["peak memory, reserved", `${gib(found.peak_reserved_gib)} GiB`, limit],
    ["exposed communication", percent(found.exposed_comm_s / found.step_time_s), seconds(found.exposed_comm_s)],
    ["waiting for stages", percent(found.bubble_s / found.step_time_s), seconds(found.bubble_s)],
    ["cost", found.dollars_per_billion_tokens === null ? "unknown" : `$${dollars(found.dollars_per_billion_tokens)}`, "per billion tokens"]];
  const tool = make("select", { id: "tool", "aria-label": "tool of the launch files" }, ...tools.map((/** @type {string} */ name) => make("option", { value: name, text: name })));
  const safely = (/** @type {any} */ what) => download({ about, ...what }).then(() => showError(""), showError);
  return [
    make("p", {}, make("strong", { text: found.words }), `, ${found.stack}`),
    make("p", { class: "note", text: found.standing }),
    ...found.warnings.map((/** @type {string} */ text) => make("p", { class: "warning", text })),
    figures(entries),
    make("div", { class: "row" },
      make("button", { type: "button", id: "pin", text: "Pin this plan", onclick: () => {
        [pinned, pinnedIn] = [found, JSON.stringify(state.question)];
        state.pin = found.row;
        state.choose({ ...found });
      } }),
      make("button", { type: "button", text: "Copy the command", onclick: () => navigator.clipboard.writeText(found.command) }),
      make("button", { type: "button", text: "YAML", onclick: () => safely({ kind: "yaml" }) }), tool,
      make("button", { type: "button", text: "Launch files", onclick: () => safely({ kind: "launch", tool: tool.value }) })),
    make("pre", { tabindex: 0, "aria-label": "command", text: found.command }),
  ];
}

/**
 * The pinned plan beside the chosen one.
 * @param {any} found
 * @param {State} state
 */
function beside(found, state) {
  if (!pinned || pinned.words + pinned.stack === found.words + found.stack) return make("div");
  const change = (/** @type {number | null} */ a, /** @type {number | null} */ b) => (a && b ? `${b >= a ? "+" : ""}${(100 * (b / a - 1)).toFixed(1)}%` : "");
  const rows = ROWS.map(([name, text, value]) => make("tr", {}, make("th", { scope: "row", text: name }),
    make("td", { class: "number", text: text(pinned) }), make("td", { class: "number", text: text(found) }),
    make("td", { class: "number", text: change(value(pinned), value(found)) })));
  const causes = [...new Set([...Object.keys(pinned.breakdown), ...Object.keys(found.breakdown)])].filter(
    (name) => Math.max(pinned.breakdown[name] || 0, found.breakdown[name] || 0) > 1e-3 * found.step_time_s);
  const parts = causes.map((name) => make("tr", {}, make("th", { scope: "row", text: name }),
    make("td", { class: "number", text: seconds(pinned.breakdown[name] || 0) }), make("td", { class: "number", text: seconds(found.breakdown[name] || 0) }),
    make("td", { class: "number", text: change(pinned.breakdown[name], found.breakdown[name]) })));
  const heads = ["", "pinned", "chosen", "change"].map((text, i) => (i ? make("th", { scope: "col", class: "number", text }) : make("td")));
  const unpin = make("button", { type: "button", id: "unpin", text: "Unpin", onclick: () => {
    [pinned, state.pin] = [null, null];
    state.choose({ ...found });
  } });
  return make("div", {}, make("h3", { text: "Beside the pinned plan" }), make("p", { class: "note", text: `Pinned: ${pinned.words}, ${pinned.stack}` }),
    make("div", { class: "row" }, make("button", { type: "button", text: "Choose the pinned plan", onclick: () => state.choose({ ...pinned }) }), unpin),
    make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "pinned and chosen plan" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows, ...parts))));
}

/**
 * Reads the pinned plan of an address, once the server has the answer; a plan that is pinned by hand is there already.
 * @param {State} state
 */
export async function restorePin(state) {
  const asked = JSON.stringify(state.question);
  if (state.pin !== null && pinned && pinned.row === state.pin && pinnedIn === asked) return;
  pinned = null;
  if (state.pin === null) return;
  const found = await call("plan", { question: state.question, row: state.pin }).catch(() => null);
  if (asked !== JSON.stringify(state.question)) return;
  [pinned, pinnedIn] = [found, asked];
  if (!found) state.pin = null;
}

/**
 * @param {any[]} rows
 * @param {State} state
 */
function neighbours(rows, state) {
  if (!rows.length) return make("div");
  const lines = rows.map((each) => {
    const also = each.also.length ? ` (with other ${each.also.join(", ").replaceAll("_", " ")})` : "";
    return make("tr", {}, make("th", { scope: "row", class: "plan" }, make("button", { type: "button", class: "plain", text: `${each.field.replaceAll("_", " ")} = ${each.value}`,
      onclick: () => state.choose(each.place) }), make("small", { text: also })),
      make("td", { class: "number", text: `${each.change >= 0 ? "+" : ""}${(100 * each.change).toFixed(1)}%` }),
      make("td", { class: "number", text: gib(each.place.peak_reserved_gib) }), make("td", { text: each.why }));
  });
  const heads = ["one other choice", "step time", "peak, GiB", "what changes most"].map((text, i) => make("th", { scope: "col", class: i === 1 || i === 2 ? "number" : null, text }));
  return make("div", {}, make("h3", { text: "Why its neighbours are worse or better" }), make("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-label": "neighbours" },
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines))));
}
