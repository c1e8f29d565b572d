// @ts-check
// Shows the typed parts of a report: headings, texts, figures, tables that can be sorted, plots.

import { make } from "./api.js";
import { figure } from "./figures.js";

/**
 * Returns sections of parts, each under its heading and closed until it is opened, but for the first `open` ones.
 * @param {any[]} parts
 * @param {number} open
 */
export function sections(parts, open) {
  /** @type {{title: string, parts: any[]}[]} */
  const found = [{ title: "", parts: [] }];
  for (const part of parts) {
    if (part.type === "heading") found.push({ title: part.text, parts: [] });
    else found[found.length - 1].parts.push(part);
  }
  return found.flatMap((each, number) => {
    if (!each.title) return each.parts.map((part) => shown(part, "figure"));
    const body = make("div");
    const fill = () => {
      if (!body.childNodes.length) body.append(...each.parts.map((part) => shown(part, each.title)));
    };
    const box = make("details", { open: number <= open, ontoggle: fill }, make("summary", { text: each.title }), body);
    if (number <= open) fill();
    return [box];
  });
}

/**
 * @param {any} part
 * @param {string} name
 * @returns {any}
 */
function shown(part, name) {
  switch (part.type) {
    case "text":
      return make("p", { class: part.kind === "hint" ? "note" : part.kind || null, text: part.text });
    case "listing":
      return make("ul", { class: "lines" }, ...part.lines.map((/** @type {string} */ line) => make("li", { text: line })));
    case "figures":
      return figures(part.entries);
    case "table":
      return table(part);
    case "plot":
      return figure(part, name);
    default:
      return make("div", {}, part.caption ? make("p", { class: "note", text: part.caption }) : null,
        make("pre", { tabindex: 0, text: part.text }));
  }
}

/** @param {[string, string, string][]} entries */
export function figures(entries) {
  return make("dl", { class: "figures" }, ...entries.map(([name, value, remark]) =>
    make("div", {}, make("dt", { text: name }), make("dd", {}, value, make("small", { text: remark })))));
}

/** @param {any} part */
function table(part) {
  const rows = part.rows.map((/** @type {string[]} */ row) =>
    make("tr", {}, ...row.map((cell, i) => {
      const attributes = { class: part.numeric.includes(i) ? "number" : null };
      return i === 0 ? make("th", { scope: "row", ...attributes }, ...breakable(cell)) : make("td", { ...attributes, text: cell });
    })));
  const body = make("tbody", {}, ...rows);
  const named = part.columns.some(Boolean);
  const head = named ? make("thead", {}, make("tr", {}, ...part.columns.map((/** @type {string} */ column, /** @type {number} */ i) =>
    heading(column, part.numeric.includes(i), (down) => sort(body, i, down))))) : null;
  const note = part.n_rows > part.rows.length
    ? make("p", { class: "note", text: `The first ${part.rows.length} of ${part.n_rows} rows.` }) : null;
  const caption = part.caption ? make("caption", { text: part.caption }) : null;
  return make("div", {}, make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": part.caption || "table" },
    make("table", {}, caption, head, body)), note);
}

/**
 * Returns a name such as attention.kernel.backward so that it can go on in the next line after each of its parts.
 * @param {string} name
 */
function breakable(name) {
  return name.split(/(?<=[./])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
}

/**
 * Returns the head of a column, which sorts its table: a button for keyboards, and aria-sort for screen readers.
 * @param {string} text
 * @param {boolean} isNumber
 * @param {(down: boolean) => void} sorted
 */
export function heading(text, isNumber, sorted) {
  const cell = make("th", { scope: "col", class: isNumber ? "number" : null });
  if (!text) return make("td");
  cell.append(make("button", { type: "button", text, onclick: () => {
    const down = cell.getAttribute("aria-sort") === "ascending";
    for (const each of cell.parentElement.children) each.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    sorted(down);
  } }));
  return cell;
}

/**
 * @param {HTMLElement} body
 * @param {number} column
 * @param {boolean} down
 */
function sort(body, column, down) {
  const key = (/** @type {Element} */ row) => amount(row.children[column].textContent || "");
  const rows = [...body.children].sort((one, other) => {
    const a = key(one), b = key(other);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  });
  body.append(...rows);
}

const UNITS = { ps: 1e-12, ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400 };

/** The number that a cell starts with, in its base unit; its text where there is none. */
/** @param {string} text */
function amount(text) {
  const found = /^[$]?([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*([a-z]+)?/i.exec(text.trim());
  if (!found) return text;
  const unit = /** @type {Record<string, number>} */ (UNITS)[found[2] || ""] || 1;
  return Number(found[1].replaceAll(",", "")) * unit;
}
