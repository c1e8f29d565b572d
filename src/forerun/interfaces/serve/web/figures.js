// @ts-check
// Draws the figures of reports, which are plotly figures as plain data: bars become rows of the page, lanes, lines,
// areas and points go on a canvas.

import { draw, legend, seen } from "./charts.js";
import { make } from "./api.js";

/** @typedef {{data: any[], layout: any, about: string, height_px: number}} Figure */

/**
 * Returns an element with the figure; `name` is that of its PNG file.
 * @param {Figure} figure
 * @param {string} name
 */
export function figure(figure, name) {
  const bars = figure.data.filter((each) => each.type === "bar");
  const across = bars.filter((each) => each.orientation === "h");
  if (across.length && across.every((each) => !each.base)) return rows(figure, across);
  const chart = across.length ? lanes(figure, across) : plane(figure);
  const box = make("div");
  const holder = make("figure", { class: "figure" }, legend(shown(chart.series)), box);
  holder.style.margin = "0.5rem 0";
  const made = draw(box, { ...chart, about: figure.about, name });
  holder.append(make("button", { type: "button", text: "Save as PNG", onclick: () => made.png() }));
  return holder;
}

/** @param {any[]} series */
function shown(series) {
  const names = new Set();
  return series.filter((each) => !names.has(each.label) && names.add(each.label));
}

/** Text that a report escaped for plotly. */
/** @param {unknown} text */
function plain(text) {
  return String(text ?? "")
    .replaceAll("<br>", "\n")
    .replaceAll("<extra></extra>", "")
    .replaceAll("&lt;", "<")
    .replaceAll("&gt;", ">")
    .replaceAll("&amp;", "&");
}

/** @param {any} given */
function first(given) {
  return Array.isArray(given) ? given[0] : given;
}

/**
 * Horizontal bars as rows: the name at the left, the bar beside it, marks across it.
 * @param {Figure} figure
 * @param {any[]} traces
 */
function rows(figure, traces) {
  const names = [...new Set(traces.flatMap((each) => each.y))];
  const marks = figure.data.find((each) => each.type === "scatter");
  const total = (/** @type {string} */ name) =>
    traces.reduce((sum, each) => sum + Math.abs(each.x[each.y.indexOf(name)] || 0), 0);
  const limit = (figure.layout.xaxis.range || [0, 0])[1];
  const most = Math.max(limit, ...names.map(total), ...(marks ? marks.x : [0])) || 1;
  const box = make("div", { class: "bars", role: "img", "aria-label": figure.about });
  for (const name of names) {
    const track = make("div", { class: "track" });
    for (const each of traces) {
      const i = each.y.indexOf(name);
      if (i < 0) continue;
      const part = make("b", { title: plain(each.name || "") });
      part.style.width = `${(100 * Math.abs(each.x[i] || 0)) / most}%`;
      const own = Array.isArray(each.marker.color) ? each.marker.color[i] : each.marker.color;
      part.style.background = seen(own).startsWith("--") ? `var(${seen(own)})` : own;
      track.append(part);
    }
    if (marks && marks.y.includes(name)) {
      const line = make("em", { title: marks.name });
      line.style.left = `${(100 * marks.x[marks.y.indexOf(name)]) / most}%`;
      track.append(line);
    }
    box.append(make("div", {}, make("span", { text: plain(name) }), track));
  }
  const title = make("p", { class: "note", text: plain(figure.layout.xaxis.title.text) });
  const named = traces.length > 1 ? traces.map((t) => ({ label: t.name, colour: seen(first(t.marker.color)) })) : [];
  return make("div", {}, named.length ? legend(named) : null, box, title);
}

/**
 * Horizontal bars that start anywhere: what runs in each lane, and when.
 * @param {Figure} figure
 * @param {any[]} traces
 */
function lanes(figure, traces) {
  const order = figure.layout.yaxis.categoryarray || [...new Set(traces.flatMap((each) => each.y))].reverse();
  const place = new Map(order.map((/** @type {string} */ name, /** @type {number} */ i) => [name, i]));
  const series = traces.map((each) => ({
    label: plain(each.name),
    colour: seen(first(each.marker.color)),
    kind: /** @type {const} */ ("lanes"),
    x: each.base,
    x1: each.base.map((/** @type {number} */ start, /** @type {number} */ i) => start + each.x[i]),
    y: each.y.map((/** @type {string} */ name) => place.get(name) ?? 0),
    text: (/** @type {number} */ i) => {
      const words = each.customdata ? each.customdata[i] : each.y[i];
      if (!Array.isArray(words)) return plain(words);
      return `${plain(words[0])}\nstarts at ${plain(words[1])}, runs for ${plain(words[2])}`;
    },
  }));
  return {
    series,
    x: { label: title(figure.layout.xaxis), range: figure.layout.xaxis.range },
    y: { label: "", range: /** @type {[number, number]} */ ([-0.6, order.length - 0.4]), names: order.map(plain) },
    height: Math.max(150, 90 + 34 * order.length),
  };
}

/** @param {any} axis */
function title(axis) {
  return plain((axis.title || {}).text || "").replace(" (logarithmic)", "");
}

/**
 * Lines, areas, points and upright bars.
 * @param {Figure} figure
 */
function plane(figure) {
  const { xaxis, yaxis } = figure.layout;
  const names = figure.data.some((each) => each.x.some((/** @type {any} */ value) => typeof value === "string"))
    ? [...new Set(figure.data.flatMap((each) => each.x))]
    : null;
  const at = (/** @type {any} */ value) => (names ? names.indexOf(value) : value);
  /** @type {Map<any, number>} */
  const stacked = new Map();
  const made = figure.data.map((each) => {
    const isBar = each.type === "bar", isArea = Boolean(each.stackgroup);
    const y0 = each.x.map((/** @type {any} */ x) => (isArea || isBar ? stacked.get(x) || 0 : 0));
    const y = each.y.map((/** @type {number} */ value, /** @type {number} */ i) => (isArea || isBar ? y0[i] + value : value));
    if (isArea || isBar) each.x.forEach((/** @type {any} */ x, /** @type {number} */ i) => stacked.set(x, y[i]));
    const own = isBar ? first(each.marker.color) : (each.line || {}).color || first((each.marker || {}).color) || "#0072B2";
    const texts = each.customdata || each.text;
    const dash = (each.line || {}).dash;
    return {
      label: plain(each.name || title(yaxis)),
      colour: seen(own),
      kind: isBar ? "bars" : isArea ? "area" : (each.mode || "lines").includes("lines") ? "line" : "points",
      x: each.x.map(at),
      y,
      y0,
      shape: (each.line || {}).shape,
      dash: dash === "dash" ? [7, 5] : dash === "dot" ? [2, 4] : dash === "dashdot" ? [7, 4, 2, 4] : [],
      symbol: "circle",
      quiet: each.hoverinfo === "skip",
      ...(texts && Array.isArray(texts) ? { text: (/** @type {number} */ i) => plain(first(texts[i])) } : {}),
    };
  });
  const marked = figure.data.flatMap((each, i) =>
    (each.mode || "").includes("lines+markers") ? [{ ...made[i], kind: "points" }] : [],
  );
  /** @type {any[]} */
  const series = [...made, ...marked];
  return {
    series,
    x: {
      label: title(xaxis),
      log: xaxis.type === "log",
      ...(names ? { names: names.map(plain), range: /** @type {[number, number]} */ ([-0.6, names.length - 0.4]) } : {}),
      ...(xaxis.range && xaxis.type !== "log" && !names ? { range: xaxis.range } : {}),
      ...(xaxis.tickvals ? { ticks: xaxis.tickvals } : {}),
    },
    y: {
      label: title(yaxis),
      log: yaxis.type === "log",
      ...(yaxis.range && yaxis.type !== "log" ? { range: yaxis.range } : {}),
    },
    height: Math.min(figure.height_px, 330),
  };
}
