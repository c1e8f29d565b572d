// @ts-check
// Plots of many points on a canvas, drawn with uPlot: points and lines, with a tooltip for what is under the pointer.

import { byId, make, save } from "./api.js";

/**
 * @typedef {{label: string, colour: string, kind: "points" | "line", x: number[], y: number[], shape?: string, dash?: number[],
 *   size?: number, symbol?: string, faint?: boolean, quiet?: boolean, text?: (i: number) => string}} Series
 * @typedef {{label: string, log?: boolean, range: [number, number]}} Axis
 * @typedef {{series: Series[], x: Axis, y: Axis, height: number, about: string, name: string,
 *   pick?: (series: number, i: number) => void}} Chart
 */

/** @param {string} name */
export function colour(name) {
  return name.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(name).trim() : name;
}

const drawn = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((each) => each.redraw()));
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) drawn.forEach((each) => each.box === target && each.resize());
});

/**
 * Draws a chart in `box`, in place of what was there, and returns it.
 * @param {HTMLElement} box
 * @param {Chart} chart
 */
export function draw(box, chart) {
  for (const each of drawn) if (!each.box.isConnected || each.box === box) remove(each);
  box.replaceChildren();
  box.classList.add("chart");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", chart.about);
  /** @type {any} */
  const made = { box, plot: null };
  made.redraw = () => {
    if (made.plot) made.plot.destroy();
    made.plot = plotted(box, chart);
  };
  made.resize = () => {
    if (made.plot && Math.abs(made.plot.width - box.clientWidth) > 1) {
      made.plot.setSize({ width: box.clientWidth, height: chart.height });
    } else if (!made.plot && box.clientWidth) made.redraw();
  };
  made.png = () => png(made.plot, chart.name);
  drawn.add(made);
  if (box.clientWidth) made.redraw();
  watcher.observe(box);
  return made;
}

/** @param {any} each */
function remove(each) {
  watcher.unobserve(each.box);
  if (each.plot) each.plot.destroy();
  drawn.delete(each);
}

/** The names of the series, each with a small picture of its line or of its points. */
/** @param {Series[]} series */
export function legend(series) {
  return make("ul", { class: "legend" }, ...series.map((each) => {
    const shape = each.kind === "line" ? (each.dash ? "dashed" : "line") : each.symbol || "dot";
    const mark = make("i", { class: shape, "aria-hidden": "true" });
    mark.style.color = each.colour.startsWith("--") ? `var(${each.colour})` : each.colour;
    return make("li", {}, mark, each.label);
  }));
}

/**
 * @param {HTMLElement} box
 * @param {Chart} chart
 */
function plotted(box, chart) {
  const ink = colour("--ink"), grid = colour("--grid");
  const scales = { x: scale(chart.x), y: scale(chart.y) };
  /** @type {any} */
  const options = {
    mode: 2,
    width: box.clientWidth,
    height: chart.height,
    scales,
    legend: { show: false },
    cursor: { drag: { x: true, y: true, uni: 20 }, points: { show: false }, dataIdx: () => null },
    series: [null, ...chart.series.map((each) => ({ facets: facets(), paths: painter(each) }))],
    axes: [axis(chart.x, ink, grid, false), axis(chart.y, ink, grid, true)],
  };
  const data = [null, ...chart.series.map((each) => [each.x, each.y])];
  const plot = new (/** @type {any} */ (window).uPlot)(options, data, box);
  plot.over.addEventListener("mousemove", (/** @type {MouseEvent} */ event) => hover(plot, chart, event));
  plot.over.addEventListener("mouseleave", () => tip("", null));
  if (chart.pick) {
    let moved = false, start = [0, 0];
    plot.over.addEventListener("mousedown", (/** @type {MouseEvent} */ e) => (start = [e.clientX, e.clientY]));
    plot.over.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      moved = Math.hypot(event.clientX - start[0], event.clientY - start[1]) > 4;
      const found = moved ? null : nearest(plot, chart, event);
      if (found && chart.pick) chart.pick(found[0], found[1]);
    });
  }
  return plot;
}

function facets() {
  return [{ scale: "x", auto: true }, { scale: "y", auto: true }];
}

/** @param {Axis} one */
function scale(one) {
  return { time: false, distr: one.log ? 3 : 1, range: () => one.range };
}

/**
 * @param {Axis} one
 * @param {string} ink
 * @param {string} grid
 * @param {boolean} isY
 */
function axis(one, ink, grid, isY) {
  return {
    label: one.label,
    labelSize: 20,
    labelFont: "12px system-ui, sans-serif",
    font: "12px system-ui, sans-serif",
    stroke: ink,
    grid: { stroke: grid, width: 1 },
    ticks: { stroke: grid, width: 1, size: 4 },
    size: isY ? 58 : 38,
    side: isY ? 3 : 2,
    values: (/** @type {any} */ _, /** @type {number[]} */ splits) =>
      splits.map((value) => (value === null ? "" : value.toLocaleString("en", { maximumSignificantDigits: 4 }))),
    ...(one.log
      ? { splits: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ low, /** @type {number} */ high) => oneTwoFive(low, high) }
      : {}),
  };
}

/** Ticks of a logarithmic axis: 1, 2 and 5 of each decade. */
/**
 * @param {number} low
 * @param {number} high
 */
function oneTwoFive(low, high) {
  const found = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++)
    for (const digit of [1, 2, 5]) found.push(Number((digit * 10 ** decade).toPrecision(3)));
  return found.filter((tick) => tick >= low && tick <= high);
}

/**
 * Returns the function that paints a series on the canvas.
 * @param {Series} one
 */
function painter(one) {
  return (/** @type {any} */ u) => {
    const context = /** @type {CanvasRenderingContext2D} */ (u.ctx);
    const x = (/** @type {number} */ value) => u.valToPos(value, "x", true);
    const y = (/** @type {number} */ value) => u.valToPos(value, "y", true);
    const dots = devicePixelRatio;
    context.save();
    context.beginPath();
    context.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    context.clip();
    context.strokeStyle = context.fillStyle = colour(one.colour);
    context.lineWidth = 2 * dots;
    context.setLineDash((one.dash || []).map((length) => length * dots));
    PAINT[one.kind](context, one, x, y, dots);
    context.restore();
    return null;
  };
}

/** @typedef {(context: CanvasRenderingContext2D, one: Series, x: (v: number) => number, y: (v: number) => number, dots: number) => void} Paint */
/** @type {Record<string, Paint>} */
const PAINT = {
  points(context, one, x, y, dots) {
    const size = (one.size || 7) * dots;
    context.globalAlpha = one.faint ? 0.35 : 0.9;
    if (one.faint) {
      for (let i = 0; i < one.x.length; i++) context.fillRect(x(one.x[i]) - size / 2, y(one.y[i]) - size / 2, size, size);
      return;
    }
    for (let i = 0; i < one.x.length; i++) mark(context, one.symbol || "circle", x(one.x[i]), y(one.y[i]), size, dots);
  },
  line(context, one, x, y) {
    context.beginPath();
    one.x.forEach((value, i) => {
      if (i && one.shape === "vh") context.lineTo(x(one.x[i - 1]), y(one.y[i]));
      if (i) context.lineTo(x(value), y(one.y[i]));
      else context.moveTo(x(value), y(one.y[i]));
    });
    context.stroke();
  },
};

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} symbol
 * @param {number} x
 * @param {number} y
 * @param {number} size
 * @param {number} dots
 */
function mark(context, symbol, x, y, size, dots) {
  const half = size / 2;
  context.beginPath();
  if (symbol === "cross") {
    context.lineWidth = 2 * dots;
    context.moveTo(x - half, y - half);
    context.lineTo(x + half, y + half);
    context.moveTo(x - half, y + half);
    context.lineTo(x + half, y - half);
    context.stroke();
  } else if (symbol === "ring" || symbol === "square") {
    context.lineWidth = 2.5 * dots;
    if (symbol === "ring") context.arc(x, y, half, 0, 7);
    else context.rect(x - half, y - half, size, size);
    context.stroke();
  } else {
    context.arc(x, y, half, 0, 7);
    context.fill();
  }
}

/**
 * Returns the series and the point under the pointer.
 * @param {any} plot
 * @param {Chart} chart
 * @param {MouseEvent} event
 * @returns {[number, number] | null}
 */
function nearest(plot, chart, event) {
  const box = plot.over.getBoundingClientRect();
  const left = event.clientX - box.left, top = event.clientY - box.top;
  let best = null, least = 14 ** 2;
  chart.series.forEach((each, number) => {
    if (each.quiet) return;
    for (let i = 0; i < each.x.length; i++) {
      let far = (plot.valToPos(each.x[i], "x") - left) ** 2 + (plot.valToPos(each.y[i], "y") - top) ** 2;
      if (each.faint) far += 30;
      if (far < least) {
        least = far;
        best = /** @type {[number, number]} */ ([number, i]);
      }
    }
  });
  return best;
}

/**
 * @param {any} plot
 * @param {Chart} chart
 * @param {MouseEvent} event
 */
function hover(plot, chart, event) {
  const found = nearest(plot, chart, event);
  if (!found) return tip("", null);
  const each = chart.series[found[0]];
  tip(each.text ? each.text(found[1]) : each.label, event);
}

/**
 * @param {string} text
 * @param {MouseEvent | null} event
 */
function tip(text, event) {
  const box = byId("tooltip");
  box.hidden = !text;
  if (!event) return;
  box.textContent = text;
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8))}px`;
}

/**
 * @param {any} plot
 * @param {string} name
 */
function png(plot, name) {
  const source = plot.ctx.canvas, canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [source.width, source.height];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillStyle = colour("--panel");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(source, 0, 0);
  canvas.toBlob((blob) => blob && save(blob, `${name}.png`));
}
