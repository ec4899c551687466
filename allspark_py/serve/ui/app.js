// The conversation: what was said, the request that runs, and the buttons and keys.

import { chat, models } from "./api.js";
import { AnswerView, QuestionView, copy, isSend } from "./message.js";
import { byId, store } from "./page.js";
import { Settings } from "./settings.js";

const prompt = byId("prompt");
const scroll = byId("scroll");
const settings = new Settings();

// The messages with their views: {message, view}. A message is {role, content}; an answer also has
// reasoning, calls of tools, facts about it, and an error if it failed.
const turns = [];
let running = null; // {controller, done} of the request that runs
let lengths = {}; // the model's length by its name

// --- the conversation ---

function addQuestion(content) {
  const turn = { message: { role: "user", content } };
  turn.view = new QuestionView(content, {
    copy: (event) => copy(turn.message.content, event.target),
    edit: () => turn.view.edit(turn.message.content, (text) => goOnFrom(turn, text)),
  });
  return addTurn(turn);
}

function addAnswer(model) {
  const message = { role: "assistant", model, content: "", reasoning: "", calls: [], facts: "" };
  const turn = { message };
  const actions = {
    copy: (event) => copy(turn.message.content, event.target),
    retry: () => goOnFrom(turn),
  };
  turn.view = new AnswerView(model, actions, () => follow());
  return addTurn(turn);
}

function addTurn(turn) {
  turns.push(turn);
  byId("messages").append(turn.view.root);
  byId("empty").hidden = true;
  return turn;
}

// Removes a turn and all after it.
function cutFrom(turn) {
  for (const each of turns.splice(turns.indexOf(turn))) each.view.root.remove();
  byId("empty").hidden = turns.length > 0;
}

// Goes on from a turn in another way: with another question, or another answer.
async function goOnFrom(turn, question) {
  await stop();
  if (!turns.includes(turn) || !areSettingsRight()) return;
  cutFrom(turn);
  if (question !== undefined) addQuestion(question);
  prompt.focus();
  await answer();
}

async function send() {
  const text = prompt.value;
  if (running || !text.trim() || !areSettingsRight()) return;
  prompt.value = "";
  addQuestion(text);
  await answer();
}

// Asks for the answer to the conversation so far.
async function answer() {
  const messages = turns.map(({ message: { role, content } }) => ({ role, content }));
  const fields = {
    ...(byId("model").value ? { model: byId("model").value } : {}),
    ...settings.fields(),
    messages: [...settings.messages(), ...messages],
  };
  const turn = addAnswer(fields.model);
  const controller = new AbortController();
  const done = receive(turn, fields, controller.signal);
  running = { controller, done };
  showRunning(true);
  follow(true);
  await done;
}

async function receive({ message, view }, fields, signal) {
  view.isRunning = true;
  const clock = { start: performance.now(), first: 0, last: 0 };
  let usage = null;
  let reason = null;
  let isStopped = false;
  try {
    for await (const chunk of chat(fields, store.get("key"), signal)) {
      usage = chunk.usage ?? usage;
      if (chunk.model && !message.model) view.title = message.model = chunk.model;
      const choice = chunk.choices?.find((each) => each.index === 0);
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      if (addDelta(message, view, choice.delta ?? {})) {
        clock.last = performance.now();
        clock.first ||= clock.last;
      }
    }
  } catch (error) {
    isStopped = error.name === "AbortError";
    if (!isStopped) message.error = error.message;
    if (error.status === 401) askForKey();
  }
  message.facts = factsOf(usage, reason, clock, isStopped);
  view.end(message);
  running = null;
  showRunning(false);
  const status = message.error ? "" : "The answer is complete.";
  byId("status").textContent = isStopped ? "Stopped." : status;
  save();
}

// Adds a piece of the answer; whether it has any text.
function addDelta(message, view, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (reasoning) {
    message.reasoning += reasoning;
    view.put("reasoning", reasoning);
  }
  if (delta.content) {
    message.content += delta.content;
    view.put("content", delta.content);
  }
  for (const { index, function: part } of delta.tool_calls ?? []) {
    const call = (message.calls[index] ??= { name: "", arguments: "" });
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
    view.showCalls(message.calls);
  }
  return Boolean(reasoning || delta.content || delta.tool_calls);
}

function factsOf(usage, reason, clock, isStopped) {
  const facts = [];
  if (isStopped) facts.push("stopped");
  if (reason === "length") facts.push("ended by its length");
  if (reason === "abort") facts.push("aborted by the server");
  if (usage) {
    const { prompt_tokens: asked, completion_tokens: count } = usage;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    facts.push(`${count} tokens`);
    const seconds = (clock.last - clock.first) / 1000;
    if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(`prompt ${asked} tokens${cached ? `, ${cached} of them cached` : ""}`);
    if (clock.first) facts.push(`first after ${((clock.first - clock.start) / 1000).toFixed(2)} s`);
  }
  return facts.join(" · ");
}

// Ends the answer that runs, and returns once it has ended.
async function stop() {
  while (running) {
    running.controller.abort();
    await running.done;
  }
}

async function begin() {
  await stop();
  if (turns.length) cutFrom(turns[0]);
  save();
  prompt.focus();
}

function save() {
  store.set("turns", turns.map((turn) => turn.message));
}

function load() {
  for (const saved of store.get("turns") ?? []) {
    if (saved.role === "user") {
      addQuestion(saved.content);
      continue;
    }
    const { message, view } = addAnswer(saved.model);
    Object.assign(message, saved);
    view.put("reasoning", saved.reasoning);
    view.put("content", saved.content);
    view.showCalls(saved.calls);
    view.end(message);
  }
}

// --- the page around it ---

function showRunning(isRunning) {
  const button = byId("send");
  button.textContent = isRunning ? "Stop" : "Send";
  button.classList.toggle("stop", isRunning);
  if (isRunning) byId("status").textContent = "Answering.";
}

// Keeps the end in sight while text comes, unless the reader has scrolled away from it.
let isFollowing = true;
function follow(force = false) {
  isFollowing ||= force;
  if (isFollowing) scroll.scrollTop = scroll.scrollHeight;
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function showSettings(isOpen) {
  document.body.classList.toggle("with-settings", isOpen);
  byId("toggle").setAttribute("aria-expanded", isOpen);
}

// Whether a request can be made of the settings; if not, they are shown with the error.
function areSettingsRight() {
  const areRight = settings.fields() !== null;
  if (!areRight) {
    showSettings(true);
    settings.more.focus();
  }
  return areRight;
}

function askForKey() {
  byId("key-panel").hidden = false;
  scroll.scrollTop = 0;
  byId("key").focus();
}

async function saveKey() {
  store.set("key", byId("key").value.trim());
  byId("key").value = "";
  byId("key-panel").hidden = true;
  await listModels();
  if (byId("key-panel").hidden) prompt.focus();
}

async function listModels() {
  const select = byId("model");
  try {
    const list = await models(store.get("key"));
    lengths = Object.fromEntries(list.map((each) => [each.id, each.max_model_len]));
    select.replaceChildren(...list.map((each) => new Option(each.id)));
    const saved = store.get("model");
    if (saved in lengths) select.value = saved;
    select.disabled = list.length < 2;
    settings.setLength(lengths[select.value]);
    notice("");
  } catch (error) {
    if (error.status === 401) askForKey();
    const isFirst = error.status === 401 && !store.get("key");
    notice(isFirst ? "" : error.message);
  }
}

byId("send").addEventListener("click", () => (running ? stop() : send()));
byId("new").addEventListener("click", begin);
byId("save-key").addEventListener("click", saveKey);
byId("key").addEventListener("keydown", (event) => isSend(event) && saveKey());
byId("model").addEventListener("change", (event) => {
  store.set("model", event.target.value);
  settings.setLength(lengths[event.target.value]);
});
byId("toggle").addEventListener("click", () => {
  showSettings(!document.body.classList.contains("with-settings"));
});
byId("messages").addEventListener("click", ({ target }) => {
  if (target.className === "copy-code") {
    copy(target.closest("figure").querySelector("code").textContent, target);
  }
});
scroll.addEventListener("scroll", () => {
  isFollowing = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
});
prompt.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  send();
});
addEventListener("pagehide", save);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

load();
follow(true);
listModels();
