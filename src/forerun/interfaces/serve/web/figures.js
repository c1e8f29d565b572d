// @ts-check
// Draws the figures of reports with the script that draws them on the pages of reports.

import { make } from "./api.js";

/** @typedef {{data: any[], layout: any, about: string, height_px: number}} Figure */

/**
 * Returns an element with the figure, which is drawn as soon as it is on the page; `name` is that of its PNG file.
 * @param {Figure} figure
 * @param {string} name
 */
export function figure(figure, name) {
  const box = make("div", { class: "plot", role: "figure", "aria-label": figure.about });
  const draw = (/** @type {any} */ (window)).Chart.live;
  queueMicrotask(() => draw(box, { data: figure.data, layout: figure.layout, name }, figure.height_px));
  return box;
}

/**
 * Returns a figure of one line with its points.
 * @param {{label: string, colour: string, x: number[], y: number[], texts: string[], x_label: string}} line
 */
export function curve({ label, colour, x, y, texts, x_label }) {
  const log = x.length > 1, marker = { size: 9, color: colour };
  const ticks = { tickvals: x, ticktext: x.map((value) => value.toLocaleString("en")) };
  return figure({
    about: `${label} over ${x_label}`, height_px: 240,
    data: [{ type: "scatter", mode: "lines+markers", name: label, x, y, marker, line: { color: colour, width: 2 },
      customdata: texts, hovertemplate: "%{customdata}<extra></extra>" }],
    layout: { showlegend: false, xaxis: { title: { text: x_label }, ...(log ? { type: "log" } : {}), ...ticks },
      yaxis: { title: { text: label }, range: [0, 1.1 * Math.max(...y)] } },
  }, label);
}
