// The page: passes the server's data to the parts that draw it.

import { Chat } from "./chat.js";
import { Charts } from "./charts.js";
import { bar, byId, legend, make, replaceIfNew } from "./dom.js";
import { bytes, duration, NONE, number, percent, plural, short } from "./format.js";
import { Live } from "./live.js";
import { lossyMark, sources, tell } from "./story.js";
import { Tiers } from "./tiers.js";

const MAX_STORIES = 50;
const WORDS = { device: "on the device", loaded: "loaded", reused: "reused anywhere", computed: "computed" };
const PHASES = { serving: "serving", loading: "loading the model", stopping: "stopping", failed: "the engine has failed", unreachable: "not reachable" };

const tiers = new Tiers(byId("tiers"));
const charts = new Charts(byId("charts"));
const stories = new Map();
let has = new Set();
let lastView = null;
let downSince = null;

const live = new Live("v1/penstock/live", { onEvent, onUp, onDown, onKeyWanted });
const chat = new Chat(() => live.headers(), openStory);

function onEvent(name, data) {
  if (name === "hello") hello(data);
  else if (name === "state") show(data);
  else if (name === "stories") addStories(data);
}

function hello(facts) {
  has = new Set(facts.has);
  const model = facts.models.join(", ");
  byId("model").textContent = [model, facts.host === "vllm" ? "in vLLM" : "", facts.metrics_url ?? ""].filter(Boolean).join(" · ");
  byId("foot").textContent = `Penstock ${facts.version}. Shares and medians cover the last five minutes, rates the last seconds, totals the time since the start.`;
  document.title = model ? `${model} · Penstock` : "Penstock";
  for (const part of ["sessions", "stories", "chat"]) byId(part).hidden = !has.has(part);
  byId("to-chat").hidden = !has.has("chat");
  chat.model = facts.models[0] ?? null;
  charts.start(facts.points);
  showSettings(facts.settings);
}

function show(state) {
  status(state.phase, state.error);
  if (!state.view) return;
  const { view } = state;
  lastView = view;
  tiles(view);
  advice(view.advice);
  tiers.draw(view);
  promptSources(view);
  losses(view);
  charts.add(state.point);
  if (has.has("sessions") && state.sessions) sessions(state.sessions, state.num_sessions);
}

function tiles(view) {
  const { loaded, computed, resident, all } = view.first_token_seconds;
  const others = [["computed", computed], ["on the device", resident]].filter(([, spread]) => spread?.p50).map(([name, spread]) => `${name} ${duration(spread.p50)}`);
  const ratio = loaded?.p50 && computed?.p50 ? `computed ${duration(computed.p50)}: ${number(computed.p50 / loaded.p50, 1)} times as long` : others.join(", ") || "none computed recently";
  const corrupt = sum(view.corrupt_blocks);
  const loads = unwanted(view.lost_loads);
  const saves = unwanted(view.lost_saves);
  const dropped = sum(view.dropped_blocks);
  const { running = 0, waiting = 0, loading = 0 } = view.sequences;
  const given = [
    ["Prompts reused", percent(view.reused_share), `${percent(view.hit_rate)} of lookups below the device`],
    ["Tokens saved", short(view.tokens_saved), saved(view)],
    all ? ["First token, median", duration(all.p50), `P99 ${duration(all.p99)}`] : ["First token, loaded", duration(loaded?.p50), ratio],
    ["Sequences running", number(running), `${number(waiting)} waiting, ${number(loading)} loading, ${plural(view.recent_preemptions, "preemption")} recently`],
    ["Tokens computed", `${short(view.tokens_per_second)}/s`, `P99 of a step ${duration(view.step_seconds.p99)}, between tokens ${duration(view.token_seconds.p50)}`],
    ["Cold reads per token", number(view.cold_reads_per_token, 1), view.resident_share.all === undefined ? "not counted here" : `${percent(view.resident_share.all)} of KV in use is on the device`],
    ["Corrupt blocks", number(corrupt), `since the start; ${plural(sum(loads), "load")} and ${plural(sum(saves), "save")} failed, ${plural(dropped, "save")} dropped`, corrupt > 0],
  ];
  const place = byId("tiles");
  if (place.childElementCount !== given.length) {
    place.replaceChildren(...given.map(() => make("dl", { class: "tile" }, make("dt"), make("dd", { class: "value" }), make("dd", { class: "more" }))));
  }
  given.forEach(([name, value, more, isBad], n) => {
    const tile = place.children[n];
    tile.dataset.mood = isBad ? "bad" : "";
    [name, value, more].forEach((text, part) => { if (tile.children[part].textContent !== text) tile.children[part].textContent = text; });
  });
}

function advice(found) {
  byId("hurts").hidden = found.length === 0;
  replaceIfNew(byId("advice"), found, () => found.map((each) => make("li", { "data-urgency": each.urgency },
    make("b", {}, each.urgency === "act" ? "Act:" : "Consider:"), `${each.finding}. `, each.change ? make("span", { class: "quiet" }, `${each.change}.`) : null)));
}

function promptSources(view) {
  const parts = Object.entries(WORDS).map(([kind, name]) => [kind, view.prompt_tokens[kind] ?? 0, name])
    .filter(([kind, tokens]) => tokens || kind !== "reused"); // few ask for it
  const total = parts.reduce((sum, [, tokens]) => sum + tokens, 0);
  const place = byId("sources");
  if (!total) { place.replaceChildren(make("p", { class: "quiet" }, "No prompts in the last minutes.")); return; }
  replaceIfNew(place, parts, () => [
    make("h3", { class: "unseen" }, "Where prompts' KV came from"),
    bar(parts, { tall: true, label: parts.map(([, tokens, name]) => `${name} ${percent(tokens / total)}`).join(", ") }),
    legend(parts.map(([kind, tokens, name]) => [kind, `${percent(tokens / total)} of prompt tokens ${name}`])),
  ]);
}

function sessions(found, count) {
  byId("sessions-count").textContent = count > found.length ? `the first ${found.length} of ${number(count)}` : number(count);
  const rows = byId("sessions-rows");
  if (!found.length) { replaceIfNew(rows, [], () => [make("tr", {}, make("td", { colspan: 4, class: "quiet" }, "None."))]); return; }
  replaceIfNew(rows, found, () => found.map((seen) => {
    const blocks = seen.resident_blocks + seen.cold_blocks;
    const share = blocks ? seen.resident_blocks / blocks : null;
    const words = blocks ? `${percent(share)} resident, ${number(seen.cold_blocks)} of ${plural(blocks, "block")} cold` : "none yet";
    return make("tr", {},
      make("td", { class: "id", title: seen.request_id || seen.id }, seen.request_id || seen.id, seen.tenant ? make("span", { class: "mark" }, seen.tenant) : null),
      make("td", {}, seen.phase + (seen.preemptions ? `, preempted ${seen.preemptions}×` : "")),
      make("td", { class: "num" }, `${number(seen.prompt_tokens)} + ${number(seen.output_tokens)}`),
      make("td", {}, bar([["resident", seen.resident_blocks, "resident"], ["cold", seen.cold_blocks, "cold"]], { label: words }), make("span", { class: "quiet" }, words)));
  }));
}

function addStories(told) {
  for (const story of told) stories.set(story.number, story);
  for (const old of [...stories.keys()].slice(0, -MAX_STORIES)) stories.delete(old);
  const latest = [...stories.values()].reverse();
  replaceIfNew(byId("stories-rows"), latest.map((story) => story.number), () => latest.map((story) => {
    const parts = sources(story);
    return make("tr", {},
      make("td", { class: "id" }, make("button", { type: "button", class: "link", "data-key": String(story.number), title: "Details", onclick: () => openStory(story.request_id || story.id, story) }, story.request_id || story.id), story.lossy_tokens ? lossyMark() : null),
      make("td", { class: "num" }, number(story.prompt_tokens)),
      make("td", {}, bar(parts, { label: parts.map(([, , name]) => name).join(", ") })),
      make("td", { class: "num" }, duration(story.first_token_seconds)));
  }));
}

async function openStory(id, known = null) {
  const dialog = byId("story");
  const body = byId("story-body");
  try {
    body.replaceChildren(...(known ? tell(known) : (await fetchStory(id)).flatMap(tell)));
  } catch (error) {
    body.replaceChildren(make("p", {}, `${error.message}.`));
  }
  if (!dialog.open) dialog.showModal();
}

async function fetchStory(id) {
  const response = await fetch(`v1/penstock/requests/${encodeURIComponent(id)}`, { headers: live.headers() });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  return answer.sequences;
}

function losses(view) {
  const queued = view.tiers.filter((tier) => tier.name !== "device").map((tier) => [`Waiting for ${tier.name}`, `${plural(tier.queued_loads, "load")}, ${plural(tier.queued_saves, "save")}`, false]);
  const rows = [
    ...queued,
    ["Corrupt blocks, by tier", counts(view.corrupt_blocks), sum(view.corrupt_blocks) > 0],
    ["Failed loads, by reason", counts(view.lost_loads), sum(unwanted(view.lost_loads)) > 0],
    ["Failed saves, by reason", counts(view.lost_saves), sum(unwanted(view.lost_saves)) > 0],
    ["Saves dropped, by tier", counts(view.dropped_blocks), sum(view.dropped_blocks) > 0],
    ["Requests refused", counts(view.refused), sum(view.refused) > 0],
    ["Requests ended", counts(view.requests), false],
    ["Load or compute, last minutes", counts(view.decisions), false],
    ["Preemptions since the start", number(view.preemptions), false],
    ["Retained by hints", `${number(view.retained_blocks)} of ${plural(view.retainable_blocks, "block")} at most`, false],
  ];
  replaceIfNew(byId("losses").tBodies[0], rows, () => rows.map(([name, value, isBad]) => make("tr", {}, make("td", {}, name), make("td", { class: isBad ? "num bad" : "num" }, value))));
}

function showSettings(settings) {
  const sections = Object.entries(settings);
  byId("settings").hidden = sections.length === 0;
  byId("settings-list").replaceChildren(...sections.map(([section, values]) => make("details", {}, make("summary", {}, section),
    make("table", {}, make("tbody", {}, Object.entries(values).map(([key, value]) => make("tr", {}, make("td", {}, make("code", {}, key)), make("td", { class: "num" }, setting(key, value)))))))));
}

function setting(key, value) {
  if (value === null) return NONE;
  const isSize = typeof value === "number" && (key === "size" || key.endsWith("_bytes"));
  return isSize ? bytes(value) : String(value);
}

function status(phase, error = "") {
  const pill = byId("status");
  const words = PHASES[phase] ?? phase;
  if (pill.textContent !== words) pill.textContent = words;
  pill.dataset.state = phase;
  byId("banner").hidden = !error;
  byId("banner").textContent = error ? `${error}. This page keeps trying.` : "";
  document.body.toggleAttribute("data-stale", phase === "unreachable");
}

function onUp() {
  downSince = null;
  stories.clear();
  status("serving");
}

function onDown(reason) {
  downSince ??= Date.now();
  status("unreachable", `The server has been unreachable since ${new Date(downSince).toLocaleTimeString()} (${reason})`);
}

function onKeyWanted(wasWrong) {
  byId("key-wrong").hidden = !wasWrong;
  status("unreachable", "");
  byId("status").textContent = "requires a key";
  if (!byId("key").open) byId("key").showModal();
}

byId("key-form").addEventListener("submit", () => {
  live.useKey(byId("key-text").value.trim());
  byId("key-text").value = "";
});
byId("key").addEventListener("cancel", (event) => event.preventDefault());

byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("penstock-theme", theme);
  document.documentElement.dataset.theme = theme;
});
const wished = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => { document.documentElement.dataset.theme = localStorage.getItem("penstock-theme") ?? (wished.matches ? "dark" : "light"); };
wished.addEventListener("change", setTheme);
setTheme();
addEventListener("resize", () => { if (lastView) tiers.draw(lastView); });

// Tokens and time of the same span. Time is estimated only for loaded tokens.
function saved(view) {
  const { device = 0, loaded = 0 } = view.prompt_tokens_since_start;
  const time = view.seconds_saved > 0 ? `, which saved about ${duration(view.seconds_saved)}` : "";
  return `since the start: ${short(device)} on the device, ${short(loaded)} loaded${time}`;
}

// Without dropped saves, which are counted separately, and cancelled transfers, which are intended.
function unwanted({ dropped: _dropped, cancelled: _cancelled, ...others }) { return others; }

function sum(counted) { return Object.values(counted).reduce((total, count) => total + count, 0); }

function counts(counted) {
  const parts = Object.entries(counted).filter(([, count]) => count > 0);
  return parts.length ? parts.map(([name, count]) => `${name} ${number(count)}`).join(", ") : "none";
}
