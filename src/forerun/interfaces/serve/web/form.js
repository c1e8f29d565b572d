// @ts-check
// The form of the question, and the question in the address of the page.

import { byId, call, make, showError } from "./api.js";

/** @typedef {{model: string, cluster: string, gpus: number, seq_len: number, global_batch: number, objective: string,
 *   price: number | null, memory_limit: number | null, images: number | null, encoder_seq_len: number | null,
 *   freeze_encoder: boolean, mtp: number | null, fixed: Record<string, string>}} Question */

const NUMBERS = /** @type {const} */ ([
  ["gpus", "GPUs", "number of GPUs of the run", 0, 14],
  ["global_batch", "Global batch", "sequences in a step, over all GPUs", 0, 14],
  ["seq_len", "Sequence length", "tokens of a sequence", 7, 20],
]);
const INPUTS = /** @type {const} */ ([
  ["images", "Images", "images or sounds of a sequence, for a model with a tower; empty: the language model alone", 0],
  ["encoder_seq_len", "Encoder length", "patches of an image, frames of a sound or tokens of a source text; empty: the model's own", 1],
  ["mtp", "MTP modules", "modules for multi-token prediction; empty: none", 0],
]);
const WAIT_MS = 250;

/** @type {any} */
let options = null;
/** @type {(question: Question) => void} */
let changed = () => {};
let waiting = 0;

/**
 * Makes the form; `asked` is called with a question a moment after each change.
 * @param {any} offered
 * @param {(question: Question) => void} asked
 */
export function makeForm(offered, asked) {
  options = offered;
  changed = asked;
  const form = byId("question");
  const models = select("model", options.models);
  if (options.cached_models.length) models.append(make("optgroup", { label: "in your hub cache" },
    ...options.cached_models.map((/** @type {string} */ value) => make("option", { value, text: value }))));
  form.replaceChildren(
    field("model", "Model", "a preset, a model in your hub cache, or a config.json that you drop here", models),
    dropArea(),
    field("cluster", "Cluster", "GPUs per node, and memory of each", select("cluster", options.clusters.map((/** @type {any} */ each) => each.name))),
    ...NUMBERS.map(([name, label, help, low, high]) => field(name, label, help, number(name, low, high))),
    field("objective", "Best by", "figure that the best plan minimises", select("objective", ["time", "memory"])),
    field("price", "Price", "dollars per GPU hour; empty: the cluster's list price",
      make("input", { type: "number", id: "q-price", min: 0, step: "any" })),
    field("memory_limit", "Memory to use", "GiB that a run may use of a GPU; empty: all",
      make("input", { type: "number", id: "q-memory_limit", min: 0, step: "any" })),
    inputsOfModel(),
    fixedFields("Fixed fields of the plan", (each) => each.first, innerWidth >= 760),
    fixedFields("More fields", (each) => !each.first, false),
    make("div", { class: "row" }, make("button", { type: "submit", text: "Search" }),
      make("button", { type: "button", text: "Clear the fixed fields", onclick: () => {
        for (const each of options.fields) byId(`q-f-${each.name}`).value = "";
        later(0);
      } })),
  );
  byId("q-cluster").addEventListener("change", aboutCluster);
  form.addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    later(0);
  });
  form.addEventListener("change", () => later(0));
  form.addEventListener("input", () => later(WAIT_MS));
}

/** Says what a node of the chosen cluster has, and the price that an empty field stands for. */
function aboutCluster() {
  const chosen = options.clusters.find((/** @type {any} */ each) => each.name === byId("q-cluster").value);
  if (!chosen) return;
  byId("about-cluster").textContent = chosen.about;
  byId("q-price").placeholder = chosen.price === null ? "" : String(chosen.price);
}

/** @param {number} wait_ms */
function later(wait_ms) {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (byId("question").reportValidity()) changed(question());
  }, wait_ms);
}

/**
 * @param {string} name
 * @param {string} label
 * @param {string} help
 * @param {HTMLElement} input
 */
function field(name, label, help, input) {
  const about = help ? make("small", { id: `about-${name}`, text: help }) : null;
  const control = input.id ? input : input.querySelector("input[type=number]");
  if (about && control) control.setAttribute("aria-describedby", about.id);
  return make("div", {}, make("label", { for: `q-${name}`, text: label }), input, about);
}

/**
 * @param {string} name
 * @param {string[]} values
 */
function select(name, values) {
  return make("select", { id: `q-${name}` }, ...values.map((value) => make("option", { value, text: value })));
}

/**
 * A number, and a slider over the powers of two.
 * @param {string} name
 * @param {number} low
 * @param {number} high
 */
function number(name, low, high) {
  const box = make("input", { type: "number", id: `q-${name}`, min: 1, max: options.limits[name], step: 1, required: true });
  const slider = make("input", { type: "range", min: low, max: high, step: 1, "aria-label": `${name.replace("_", " ")}, power of two` });
  slider.addEventListener("input", () => (box.value = String(2 ** Number(slider.value))));
  box.addEventListener("input", () => (slider.value = String(Math.log2(Number(box.value) || 1))));
  box.sync = () => (slider.value = String(Math.log2(Number(box.value) || 1)));
  return make("div", {}, box, slider);
}

/**
 * @param {string} title
 * @param {(field: any) => boolean} isShown
 * @param {boolean} open
 */
function fixedFields(title, isShown, open) {
  const fields = options.fields.filter(isShown).map((/** @type {any} */ each) => {
    const list = each.values.length ? make("datalist", { id: `values-${each.name}` },
      ...each.values.map((/** @type {string} */ value) => make("option", { value }))) : null;
    const input = make("input", { type: "text", id: `q-f-${each.name}`, list: list ? list.id : null, maxlength: 400,
      placeholder: each.values.length && each.values.length < 4 ? each.values.join(", ") : "any" });
    return make("div", {}, field(`f-${each.name}`, each.name, each.help, input), list);
  });
  return make("details", { open }, make("summary", { text: title }),
    make("small", { text: "One value fixes a field, and a list (1,2,4) gives the values to try. An empty field is free." }), ...fields);
}

/** The inputs of an encoder, and modules for multi-token prediction. */
function inputsOfModel() {
  const frozen = make("input", { type: "checkbox", id: "q-freeze_encoder" });
  return make("details", { id: "inputs" }, make("summary", { text: "Images, encoder, multi-token prediction" }),
    ...INPUTS.map(([name, label, help, min]) => field(name, label, help,
      make("input", { type: "number", id: `q-${name}`, min, max: options.limits[name], step: 1 }))),
    field("freeze_encoder", "Freeze the encoder", "train only the layers behind it", frozen));
}

function dropArea() {
  const input = make("input", { type: "file", accept: ".json,application/json", "aria-label": "config.json of a model" });
  const area = make("div", { class: "drop" }, make("small", { text: "Drop a config.json here, or choose one" }), input);
  input.addEventListener("change", (/** @type {Event} */ event) => {
    event.stopPropagation();
    if (input.files.length) dropModel(input.files[0]);
  });
  dropping(area, (files) => dropModel(files[0]));
  return area;
}

/**
 * Lets files be dropped on an element.
 * @param {HTMLElement} area
 * @param {(files: File[]) => void} taken
 */
export function dropping(area, taken) {
  area.addEventListener("dragover", (event) => {
    event.preventDefault();
    area.classList.add("over");
  });
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    const files = event.dataTransfer ? [...event.dataTransfer.files] : [];
    if (files.length) taken(files);
  });
}

/** @param {File} file */
async function dropModel(file) {
  try {
    const { model } = await call("model", { name: file.name, text: await file.text() });
    const list = byId("q-model");
    if (![...list.options].some((each) => each.value === model)) list.append(make("option", { value: model, text: model }));
    list.value = model;
    showError("");
    later(0);
  } catch (error) {
    showError(error);
  }
}

/** @returns {Question} */
export function question() {
  const text = (/** @type {string} */ name) => byId(`q-${name}`).value.trim();
  const amount = (/** @type {string} */ name) => (text(name) ? Number(text(name)) : null);
  /** @type {Record<string, string>} */
  const fixed = {};
  for (const each of options.fields) if (text(`f-${each.name}`)) fixed[each.name] = text(`f-${each.name}`);
  return {
    model: text("model"), cluster: text("cluster"), gpus: Number(text("gpus")), seq_len: Number(text("seq_len")),
    global_batch: Number(text("global_batch")), objective: text("objective"), price: amount("price"),
    memory_limit: amount("memory_limit"), images: amount("images"), encoder_seq_len: amount("encoder_seq_len"),
    freeze_encoder: byId("q-freeze_encoder").checked, mtp: amount("mtp"), fixed,
  };
}

/** @param {Question} asked */
export function fill(asked) {
  for (const name of /** @type {const} */ (["model", "cluster"])) {
    const list = byId(`q-${name}`), value = asked[name];
    if (![...list.options].some((each) => each.value === value)) list.append(make("option", { value, text: value }));
  }
  for (const name of /** @type {const} */ (["model", "cluster", "gpus", "seq_len", "global_batch", "objective", "price", "memory_limit",
    "images", "encoder_seq_len", "mtp"])) {
    byId(`q-${name}`).value = asked[name] ?? "";
    if (byId(`q-${name}`).sync) byId(`q-${name}`).sync();
  }
  byId("q-freeze_encoder").checked = asked.freeze_encoder;
  if (asked.freeze_encoder || INPUTS.some(([name]) => asked[name] !== null)) byId("inputs").open = true;
  for (const each of options.fields) byId(`q-f-${each.name}`).value = asked.fixed[each.name] || "";
  aboutCluster();
}

/**
 * The question and the chosen plans as the part of an address behind #.
 * @param {Question} asked
 * @param {Record<string, number | null>} rows
 */
export function toAddress(asked, rows) {
  const state = new URLSearchParams();
  for (const [name, value] of Object.entries(asked)) if (name !== "fixed" && value !== null && value !== false) state.set(name, String(value));
  for (const [name, value] of Object.entries(asked.fixed)) state.set(`f.${name}`, value);
  for (const [name, value] of Object.entries(rows)) if (value !== null && value !== undefined) state.set(name, String(value));
  return `#${state}`;
}

/**
 * @param {string} hash
 * @param {Question} usual
 * @returns {{question: Question, row: number | null, pin: number | null, any: boolean}}
 */
export function fromAddress(hash, usual) {
  const state = new URLSearchParams(hash.slice(1));
  const amount = (/** @type {string} */ name) => (state.get(name) ? Number(state.get(name)) : null);
  /** @type {Record<string, string>} */
  const fixed = {};
  for (const [name, value] of state) if (name.startsWith("f.")) fixed[name.slice(2)] = value;
  return {
    question: {
      model: state.get("model") || usual.model, cluster: state.get("cluster") || usual.cluster,
      gpus: amount("gpus") || usual.gpus, seq_len: amount("seq_len") || usual.seq_len,
      global_batch: amount("global_batch") || usual.global_batch, objective: state.get("objective") || usual.objective,
      price: amount("price"), memory_limit: amount("memory_limit"), images: amount("images"),
      encoder_seq_len: amount("encoder_seq_len"), freeze_encoder: state.get("freeze_encoder") === "true", mtp: amount("mtp"), fixed,
    },
    row: amount("row"), pin: amount("pin"), any: state.has("model") || state.has("demo"),
  };
}
