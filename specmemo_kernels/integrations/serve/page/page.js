"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null; // the request in progress

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function entry(kind, text) {
  const item = document.createElement("li");
  item.className = kind;
  item.textContent = text;
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

/** Server-sent events of a response, as objects. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

/** Ask for an answer to the conversation, and show it as it comes. */
async function send(text) {
  const message = { role: "user", content: text };
  messages.push(message);
  const asked = entry("user", text);
  const reasoning = entry("reasoning", "");
  const reply = entry("assistant", "");
  running = new AbortController();
  $("send").textContent = "Stop";
  try {
    const headers = { "content-type": "application/json" };
    if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
    const body = JSON.stringify({
      messages, stream: true, max_tokens: Number($("tokens").value), temperature: Number($("temperature").value),
    });
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body, signal: running.signal });
    if (!response.ok) {
      if (response.status === 401) $("key-label").hidden = false;
      throw new Error((await response.json()).error.message);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      reasoning.textContent += event.choices[0]?.delta.reasoning_content ?? "";
      reply.textContent += event.choices[0]?.delta.content ?? "";
      reply.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") entry("error", error.message);
  } finally {
    const cleared = messages.at(-1) !== message;
    if (!cleared && reply.textContent) messages.push({ role: "assistant", content: reply.textContent });
    else if (!cleared) { // there is no answer: the message goes back to its field
      messages.pop();
      reply.remove();
      reasoning.remove();
      asked.remove();
      if (!$("text").value) $("text").value = text;
    }
    running = null;
    $("send").textContent = "Send";
    $("text").focus();
  }
}

function rows(table, cells) {
  const body = $(table).tBodies[0];
  body.replaceChildren(...cells.map((line) => {
    const row = document.createElement("tr");
    for (const cell of line) {
      const data = document.createElement("td");
      data.append(cell);
      row.append(data);
    }
    return row;
  }));
}

function part(tag, name, style) {
  const element = document.createElement(tag);
  element.className = name;
  Object.assign(element.style, style);
  return element;
}

/** Show what the server's /stats says. */
function show(state) {
  $("model").textContent = `${state.model}, ${state.device}`;
  const names = Object.keys(state.planned).filter((name) => state.planned[name] || state.held[name]);
  const total = names.reduce((sum, name) => sum + state.planned[name], 0);
  const limit = state.budget ?? total;
  const held = Object.values(state.held).reduce((sum, bytes) => sum + bytes, 0);
  $("memory-text").textContent = state.budget === null
    ? `${size(held)} held; no budget`
    : `${size(held)} held, ${size(total)} planned, budget ${size(state.budget)}` +
      (state.pressure ? `; memory is low (level ${state.pressure})` : "");
  const colour = (index) => `var(--c${index % 8})`;
  $("memory-bar").replaceChildren(...names.map((name, index) => {
    const block = part("div", "", { width: `${100 * state.planned[name] / limit}%`, background: colour(index) });
    block.title = `${name}: ${size(state.planned[name])} planned`;
    return block;
  }));
  rows("parts", names.map((name, index) => {
    const label = document.createElement("span");
    label.append(part("span", "swatch", { background: colour(index) }), name.replaceAll("_", " "));
    return [label, size(state.planned[name]), name in state.held ? size(state.held[name]) : "in passes"];
  }));
  $("pages").value = state.pages ? state.pages_used / state.pages : 0;
  $("pages-text").textContent = state.pages
    ? `${state.pages_used} of ${state.pages} pages in use, ${state.pages_cached} more kept for reuse`
    : "no pages yet";
  $("requests").textContent = `${state.running} running, ${state.waiting} waiting`;
  $("speculation").textContent = `${state.tokens_per_step.toFixed(2)} tokens per step`;
  rows("depths", state.accepted.map((share, depth) => [
    `${depth + 1}`, `${Math.round(100 * share)} %`, part("div", "bar", { width: `${100 * share}%` }),
  ]));
}

async function poll() {
  if (!document.hidden) {
    try {
      show(await (await fetch("stats")).json());
    } catch {
      $("requests").textContent = "the server doesn't answer";
    }
  }
  setTimeout(poll, 500);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = $("text").value;
  if (!text.trim()) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("messages").replaceChildren();
  $("text").focus();
});
poll();
