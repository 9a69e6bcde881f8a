// A chat to try the server. Each answer shows how much of the prompt was cached.

import { byId, make } from "./dom.js";
import { duration, number, percent, plural } from "./format.js";
import { parse } from "./live.js";
import { lossyMark } from "./story.js";

export class Chat {
  constructor(headers, openStory) {
    this.headers = headers;
    this.openStory = openStory;
    this.messages = [];
    this.model = null;
    this.text = byId("chat-text");
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("chat-stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    byId("chat-log").replaceChildren();
    this.text.focus();
  }

  async send() {
    const content = this.text.value.trim();
    if (!content || this.abort) return;
    this.text.value = "";
    const asked = [...this.messages, { role: "user", content }];
    this.say("user", content);
    const answer = this.say("assistant", "");
    const about = make("p", { class: "about" }, "…");
    byId("chat-log").append(about);
    this.busy(new AbortController());
    const started = performance.now();
    try {
      const told = await this.ask(asked, answer, started);
      this.messages = [...asked, { role: "assistant", content: answer.textContent }];
      this.describe(about, told, (performance.now() - started) / 1000);
    } catch (error) {
      if (error.name === "AbortError") {
        about.textContent = "Stopped.";
        this.messages = [...asked, { role: "assistant", content: answer.textContent }];
      } else {
        about.textContent = `No answer: ${error.message}`;
        about.classList.add("bad");
        this.text.value = content;
      }
    } finally {
      this.busy(null);
      this.text.focus();
    }
  }

  async ask(messages, answer, started) {
    const body = { messages, stream: true, stream_options: { include_usage: true }, max_tokens: Number(byId("chat-max").value) || 128 };
    if (this.model) body.model = this.model;
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify(body),
      signal: this.abort.signal,
    });
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `the server answers with ${response.status}`);
    const told = { id: response.headers.get("X-Request-Id"), usage: null, first: null };
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return told;
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        const { data } = parse(event);
        if (!data || data === "[DONE]") continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        told.usage = chunk.usage ?? told.usage;
        const piece = chunk.choices[0]?.delta?.content;
        if (!piece) continue;
        told.first ??= (performance.now() - started) / 1000;
        answer.append(piece);
        this.scroll();
      }
    }
  }

  describe(about, told, seconds) {
    const { usage, first } = told;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const found = usage ? `${number(cached)} of ${plural(usage.prompt_tokens, "prompt token")} cached (${percent(cached / usage.prompt_tokens)})` : "";
    const speed = usage && first !== null && usage.completion_tokens > 1 ? `, then ${number((usage.completion_tokens - 1) / Math.max(1e-6, seconds - first), 1)} tokens/s` : "";
    const lossy = usage?.prompt_tokens_details?.lossy_tokens ? [lossyMark(), " "] : [];
    about.replaceChildren(...lossy, `${found}; first token after ${duration(first)}${speed}. `);
    if (told.id) about.append(make("button", { type: "button", class: "link", onclick: () => this.openStory(told.id) }, "Details"));
    this.scroll();
  }

  say(who, text) {
    const element = make("div", { class: `said ${who}` }, text);
    byId("chat-log").append(element);
    this.scroll();
    return element;
  }

  busy(abort) {
    this.abort = abort;
    byId("chat-send").disabled = Boolean(abort);
    byId("chat-stop").disabled = !abort;
  }

  scroll() {
    const log = byId("chat-log");
    log.scrollTop = log.scrollHeight;
  }
}
