// Live data as server-sent events, read with fetch because the key is sent in a header. Reconnects
// automatically.

const SILENT_MS = 8000; // the server sends once per second
const RETRY_MS = [500, 1000, 2000, 4000];

export class Live {
  constructor(url, { onEvent, onUp, onDown, onKeyWanted }) {
    this.url = url;
    this.on = { onEvent, onUp, onDown, onKeyWanted };
    this.key = sessionStorage.getItem("penstock-key");
    this.failures = 0;
    this.run();
  }

  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  useKey(key) {
    this.key = key;
    sessionStorage.setItem("penstock-key", key);
    this.wake?.();
  }

  async run() {
    for (;;) {
      let reason = "the server closed the connection";
      try {
        const response = await this.open();
        if (response.status === 401) {
          await new Promise((resolve) => { this.wake = resolve; this.on.onKeyWanted(Boolean(this.key)); });
          continue;
        }
        if (!response.ok) throw new Error(`it answers with status ${response.status}`);
        await this.read(response.body.getReader());
      } catch (error) {
        reason = error.name === "AbortError" ? "it sends no more data" : error.message;
      }
      clearTimeout(this.watchdog);
      this.on.onDown(reason);
      const wait = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
      this.failures += 1;
      await new Promise((resolve) => { setTimeout(resolve, wait); });
    }
  }

  open() {
    this.abort = new AbortController();
    this.watch();
    return fetch(this.url, { headers: this.headers(), signal: this.abort.signal, cache: "no-store" });
  }

  watch() {
    clearTimeout(this.watchdog);
    const { abort } = this;
    this.watchdog = setTimeout(() => abort.abort(), SILENT_MS);
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let text = "";
    let isNew = true;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      this.watch();
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        const { name, data } = parse(event);
        if (!data) continue;
        if (isNew) this.on.onUp();
        isNew = false;
        this.failures = 0;
        this.on.onEvent(name, JSON.parse(data));
      }
    }
  }
}

// One event: a name, and data of one or more lines.
export function parse(event) {
  let name = "message";
  const data = [];
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return { name, data: data.join("\n") };
}
