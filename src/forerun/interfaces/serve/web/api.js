// @ts-check
// Calls of the server, and small helpers to make elements. Text always goes in as text, never as HTML.

const TOKEN = "forerun-token";
/** The name of this page, so that a newer question takes the place of its own older one and of no other page's. */
const PAGE = crypto.getRandomValues(new Uint32Array(4)).join("-");

/** Takes the token out of the address, so that it is neither in the history nor in a copied address. */
export function takeToken() {
  const state = new URLSearchParams(location.hash.slice(1));
  const token = state.get("token");
  if (token) {
    sessionStorage.setItem(TOKEN, token);
    state.delete("token");
    history.replaceState(null, "", `#${state}`);
  }
  return sessionStorage.getItem(TOKEN) !== null;
}

function headers() {
  return { "x-forerun-page": PAGE, authorization: `Bearer ${sessionStorage.getItem(TOKEN) || ""}` };
}

/**
 * @param {string} path
 * @param {any} data
 * @param {AbortSignal} [signal]
 */
async function post(path, data, signal) {
  const answer = await fetch(`/api/${path}`, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(data),
    signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer;
}

/**
 * @param {string} path
 * @param {any} data
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function call(path, data, signal) {
  return (await post(path, data, signal)).json();
}

/**
 * Calls `tell` with every event of an answer, as soon as it comes.
 * @param {string} path
 * @param {any} data
 * @param {(event: any) => void} tell
 * @param {AbortSignal} signal
 */
export async function stream(path, data, tell, signal) {
  const answer = await post(path, data, signal);
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() || "";
    for (const line of lines) tell(JSON.parse(line));
  }
}

/**
 * @param {any} about
 */
export async function download(about) {
  const answer = await post("export", about);
  const name = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") || "");
  save(await answer.blob(), name ? name[1] : "forerun");
}

/**
 * @param {File[]} files
 * @param {{cluster: string, nodes: string}} where
 */
export async function sendFiles(files, where) {
  const query = new URLSearchParams(where);
  for (const file of files) {
    query.append("name", file.name);
    query.append("size", String(file.size));
  }
  const answer = await fetch(`/api/files?${query}`, { method: "POST", headers: headers(), body: new Blob(files) });
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return data;
}

/**
 * @param {Blob} blob
 * @param {string} name
 */
export function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.getAttribute("href") || ""), 1000);
}

/**
 * Makes an element. `on...` attributes are listeners, `text` is its text.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | null | undefined)} children
 * @returns {any}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = String(value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}

/** @param {string} id */
export function byId(id) {
  return /** @type {any} */ (document.getElementById(id));
}

/** @param {unknown} error */
export function showError(error) {
  const box = byId("error");
  box.hidden = !error;
  box.textContent = error ? (error instanceof Error ? error.message : String(error)) : "";
}

/** @param {string} text */
export function say(text) {
  byId("status").textContent = text;
}
