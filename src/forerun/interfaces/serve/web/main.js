// @ts-check
// The page: asks the question that the form and the address say, and shows the answer as it comes.

import { byId, call, download, say, showError, stream, takeToken } from "./api.js";
import { endScaling, makeAnswer, showAnswer, showScatter, showTable } from "./answer.js";
import { restorePin, showPlan } from "./chosen.js";
import { makeFiles } from "./files.js";
import { fill, fromAddress, makeForm, question, toAddress } from "./form.js";

/** @type {import("./answer.js").State} */
const state = { question: null, answer: {}, rows: null, n: 0, row: null, pin: null, choose, apply };
/** @type {AbortController | null} */
let asking = null;
/** @type {any} */
let options = null;
let chosenByUser = false;
/** The plan whose details are on the page. */
/** @type {number | null} */
let shown = null;

start();

async function start() {
  if (!takeToken()) {
    say("");
    showError("This page has no token. Open the address that forerun serve printed.");
    return;
  }
  try {
    options = await call("options", {});
  } catch (error) {
    say("");
    showError(error);
    return;
  }
  makeForm(options, (asked) => ask(asked, true));
  makeAnswer(state);
  makeFiles(options);
  byId("csv").addEventListener("click", () => download({ kind: "csv", about: { question: state.question } }).then(() => showError(""), showError));
  for (const name of ["planner", "files"]) byId(`view-${name}`).addEventListener("click", () => view(name));
  byId("stop").addEventListener("click", stop);
  addEventListener("popstate", fromHash);
  addEventListener("hashchange", () => new URLSearchParams(location.hash.slice(1)).has("token") && location.reload());
  fromHash();
}

/** @param {string} name */
function view(name) {
  for (const each of ["planner", "files"]) {
    byId(each).hidden = each !== name;
    byId(`view-${each}`).setAttribute("aria-pressed", String(each === name));
  }
}

function fromHash() {
  const found = fromAddress(location.hash, options.example);
  fill(found.question);
  [state.row, state.pin] = [found.row, found.pin];
  chosenByUser = found.row !== null;
  if (found.any) ask(question(), false);
  else say("Ask a question: change a field, or press Search.");
}

/**
 * @param {any} asked
 * @param {boolean} isNew
 */
async function ask(asked, isNew) {
  const isAnswered = ["searching", "proved", "whole"].includes(document.body.dataset.state || "");
  if (isNew && isAnswered && JSON.stringify(asked) === JSON.stringify(state.question)) return;
  if (asking) asking.abort();
  asking = new AbortController();
  if (isNew) {
    [state.row, state.pin] = [null, null];
    chosenByUser = false;
  }
  [state.question, state.answer, state.rows] = [asked, {}, null];
  shown = null;
  byId("wanted").value = "";
  byId("state").value = "all";
  byId("scaling-box").open = false;
  endScaling();
  byId("search-command").hidden = true;
  const address = toAddress(asked, { row: state.row, pin: state.pin });
  if (isNew) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  showError("");
  say("Searching.");
  document.body.dataset.state = "searching";
  byId("stop").hidden = false;
  try {
    await stream("ask", asked, heard, asking.signal);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") return;
    failed(error);
  }
}

/** Shows a mistake, and takes the answer to an earlier question away. */
/** @param {unknown} error */
function failed(error) {
  ended("No answer.");
  document.body.dataset.state = "failed";
  for (const name of ["found", "plan"]) byId(name).hidden = true;
  showError(error);
}

/** Says how the search ended, and takes the button away that stops it. */
/** @param {string} words */
function ended(words) {
  byId("stop").hidden = true;
  if (words) say(words);
}

function stop() {
  if (asking) asking.abort();
  document.body.dataset.state = "stopped";
  ended("Stopped. Press Search to ask again.");
}

/** @param {any} event */
function heard(event) {
  if (event.kind === "error") {
    failed(event.message);
  } else if (event.kind === "superseded") {
    document.body.dataset.state = "superseded";
    ended("A newer question replaced this one. Press Search to ask again.");
  } else if (event.kind === "waiting") {
    say("Another search is running on this server. This one comes next.");
  } else if (event.kind === "space") {
    say(`Searching ${event.plans.toLocaleString("en")} plans.`);
  } else {
    state.answer = event;
    for (const name of ["found", "plan"]) byId(name).hidden = false;
    showAnswer(state);
    if (event.kind === "answer") {
      const rest = event.whole ? "" : " Looking for the Pareto front and for what other choices are worth.";
      say(`${event.counts.considered.toLocaleString("en")} plans, ${event.proof}.${rest}`);
      document.body.dataset.state = event.whole ? "whole" : "proved";
      if (event.whole) ended("");
      settle(event);
    }
  }
}

/** Shows the chosen plan of an answer beside the pinned one: those of the address, or the best plan. */
/** @param {any} event */
async function settle(event) {
  const asked = state.question;
  await restorePin(state);
  if (state.question !== asked) return;
  if (event.whole && chosenByUser && state.row === shown) showScatter(state);
  else if (chosenByUser && state.row !== null) choose({ row: state.row });
  else if (event.top.length && !event.whole) show(event.top[0]);
  else if (event.top.length && state.row === null) show(event.top[0]);
  else if (event.whole) showScatter(state);
}

/** @param {any} place */
function choose(place) {
  chosenByUser = true;
  show(place);
}

/** @param {any} place */
function show(place) {
  shown = state.row = typeof place.row === "number" ? place.row : null;
  history.replaceState(null, "", toAddress(state.question, { row: chosenByUser ? state.row : null, pin: state.pin }));
  showScatter(state);
  showTable(state);
  showPlan(state, place, options.tools);
}

/** @param {Record<string, string>} fixed */
function apply(fixed) {
  const asked = question();
  fill({ ...asked, fixed: { ...asked.fixed, ...fixed } });
  ask(question(), true);
}

