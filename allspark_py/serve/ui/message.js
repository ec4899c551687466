// What is seen of one message. The conversation itself is app.js's.

import { Markdown } from "./markdown.js";
import { clone } from "./page.js";

class View {
  // actions: what the buttons do, by their class; buttons without an action are left out.
  constructor(title, actions) {
    this.root = clone("message-template");
    this.content = this.find(".content");
    this.title = title;
    for (const button of this.root.querySelectorAll("footer button")) {
      const action = actions[button.className];
      if (action) button.addEventListener("click", action);
      else button.remove();
    }
  }

  set title(text) {
    this.find("h2").textContent = text;
  }

  find(selector) {
    return this.root.querySelector(selector);
  }
}

export class QuestionView extends View {
  constructor(text, actions) {
    super("You", actions);
    this.root.classList.add("question");
    this.content.textContent = text;
  }

  // Puts an editor in the place of the text. `save` is called with the new text.
  edit(text, save) {
    const footer = this.find("footer");
    const editor = clone("edit-template");
    const box = editor.querySelector("textarea");
    const close = () => {
      editor.replaceWith(this.content);
      footer.hidden = false;
      this.find(".edit").focus();
    };
    const done = () => {
      if (box.value.trim()) save(box.value);
    };
    box.value = text;
    editor.querySelector(".save").addEventListener("click", done);
    editor.querySelector(".cancel").addEventListener("click", close);
    editor.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (isSend(event) && event.target === box) {
        event.preventDefault();
        done();
      }
    });
    this.content.replaceWith(editor);
    footer.hidden = true;
    editor.scrollIntoView({ block: "nearest" });
    box.focus();
  }
}

export class AnswerView extends View {
  // changed: called after what is seen has grown.
  constructor(model, actions, changed) {
    super(model || "Answer", actions);
    this.root.classList.add("answer");
    this.markdown = new Markdown(this.content);
    this.reasoning = this.find(".reasoning");
    this.calls = [];
    this.changed = changed;
    this.waiting = nothing();
    this.frame = 0; // the number of the next picture, if it shall show something
  }

  // Adds text of the content or of the reasoning.
  put(kind, text) {
    this.waiting[kind] += text;
    this.showSoon();
  }

  // Shows the calls of tools so far.
  showCalls(calls) {
    this.waiting.calls = calls;
    this.showSoon();
  }

  // What comes before the browser's next picture is shown at once.
  showSoon() {
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { content, reasoning, calls } = this.waiting;
    this.waiting = nothing();
    if (reasoning) {
      this.reasoning.hidden = false;
      this.reasoning.lastElementChild.append(reasoning);
    }
    if (content) this.markdown.put(content);
    for (const [index, call] of calls.entries()) this.showCall(index, call.name, call.arguments);
    this.changed();
  }

  showCall(index, name, text) {
    this.calls[index] ??= this.find(".calls").appendChild(clone("call-template"));
    const [summary, pre] = this.calls[index].children;
    summary.textContent = `Call of the tool ${name}`;
    pre.textContent = text;
  }

  set isRunning(value) {
    this.root.setAttribute("aria-busy", value);
  }

  // Shows the answer as it is in the end: all text, the calls' arguments in lines, and what is known
  // of the answer or why there is none.
  end(message) {
    this.show();
    this.isRunning = false;
    for (const [index, call] of message.calls.entries()) {
      this.showCall(index, call.name, inLines(call.arguments));
    }
    const error = this.find(".error");
    error.textContent = message.error ?? "";
    error.hidden = !message.error;
    this.find(".facts").textContent = message.facts;
    this.find(".copy").hidden = !message.content;
  }
}

const nothing = () => ({ content: "", reasoning: "", calls: [] });

function inLines(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// Whether a key sends what was typed. An Enter that ends the input of a character does not.
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

// Copies a text, also where the page did not come over TLS, and browsers give no clipboard.
export async function copy(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const box = document.createElement("textarea");
    box.value = text;
    box.className = "hidden";
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    button.focus();
  }
  const label = button.textContent;
  if (label === "Copied") return;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1500);
}
