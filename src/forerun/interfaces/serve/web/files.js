// @ts-check
// Files that are dropped, and the experiments and runs that come with Forerun: what the command line shows of them.

import { byId, call, make, say, sendFiles, showError } from "./api.js";
import { dropping } from "./form.js";
import { sections } from "./parts.js";

/** @param {any} options */
export function makeFiles(options) {
  const input = make("input", { type: "file", multiple: true, id: "files-input", "aria-label": "files to look at" });
  const cluster = make("select", { id: "files-cluster" }, ...options.clusters.map((/** @type {any} */ each) => make("option", { value: each.name, text: each.name })));
  cluster.value = options.example.cluster;
  const nodes = make("input", { type: "number", id: "files-nodes", min: 1, max: 16384, step: 1, value: 64 });
  const area = make("div", { class: "drop" },
    make("p", { text: "Drop a .program, a profile of PyTorch (.json, one file for each rank), Chakra traces (.et, with system.json and a network in YAML to replay them), a trace of jobs (.csv), or a YAML file of an experiment, a run or a cluster's jobs." }), input);
  const preset = (/** @type {string} */ kind, /** @type {string[]} */ names, /** @type {string} */ label) => {
    const list = make("select", { id: `preset-${kind}` }, ...names.map((name) => make("option", { value: name, text: name })));
    return make("div", { class: "row" }, make("label", { for: list.id, text: label }), list,
      make("button", { type: "button", text: "Show", onclick: () => show(() => call("preset", { kind, name: list.value })) }));
  };
  /** @type {File[]} */
  let given = [];
  const read = (/** @type {File[]} */ files) => {
    given = files;
    show(() => sendFiles(given, { cluster: cluster.value, nodes: nodes.value }));
  };
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = ""; // so that the same file can be chosen again
    if (files.length) read(files);
  });
  dropping(area, read);
  cluster.addEventListener("change", () => given.some((each) => each.name.endsWith(".program")) && read(given));
  nodes.addEventListener("change", () => given.some((each) => each.name.endsWith(".csv")) && read(given));
  byId("files").replaceChildren(make("section", { class: "panel", "aria-label": "files" }, make("h2", { text: "Files, runs and jobs" }), area,
    make("div", { class: "row" }, make("label", { for: "files-cluster", text: "Programs run on" }), cluster,
      make("label", { for: "files-nodes", text: "Traces of jobs run on" }), nodes, make("small", { text: "nodes of 8 GPUs" })),
    preset("experiment", options.experiments, "Experiment"), preset("run", options.runs, "Whole run"),
    make("div", { id: "shown-file" })));
}

/** @param {() => Promise<any>} ask */
async function show(ask) {
  say("Reading and simulating.");
  byId("shown-file").replaceChildren(make("p", { class: "note", text: "Reading and simulating." }));
  try {
    const found = await ask();
    showError("");
    byId("shown-file").replaceChildren(make("h2", { text: found.title }), make("p", { class: "note", text: found.subtitle }), ...sections(found.parts, 3));
    say(found.title);
  } catch (error) {
    byId("shown-file").replaceChildren();
    showError(error);
    say("That could not be shown.");
  }
}
