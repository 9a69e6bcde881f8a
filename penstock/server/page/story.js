// The details of one request: its timeline, and where its KV came from.

import { bar, legend, make } from "./dom.js";
import { bytes, duration, number, percent, plural, rate } from "./format.js";

const TIERS = { device: "on the device", host: "from DRAM", disk: "from disk", remote: "from the remote store" };
const STAGES = {
  wait: "waited for its turn",
  load: "loaded KV",
  prefill: "computed the prompt",
  decode: "wrote the answer",
  preempted: "was preempted and waited",
};
const ENDS = { stop: "It finished.", length: "It reached its maximum number of tokens.", abort: "It was aborted: the client hung up, or the server stopped." };

// Where a prompt's tokens came from, as parts of a bar.
export function sources(story) {
  const parts = [];
  let cached = 0;
  for (const tier of Object.keys(TIERS)) {
    const tokens = Math.min((story.found_blocks[tier] ?? 0) * story.block_tokens, story.cached_tokens - cached);
    if (tokens > 0) parts.push([tier, tokens, `${number(tokens)} tokens ${TIERS[tier]}`]);
    cached += Math.max(0, tokens);
  }
  const reused = story.reused_tokens ?? 0;
  if (reused > 0) parts.push(["reused", reused, `${number(reused)} tokens of segments reused where they stand`]);
  const computed = story.prompt_tokens - cached - reused;
  if (computed > 0) parts.push(["computed", computed, `${number(computed)} tokens computed`]);
  return parts;
}

// A badge for answers that used lossy KV.
export function lossyMark() {
  return make("span", { class: "mark lossy", title: "used KV from a tier with a lossy codec" }, "lossy KV");
}

export function tell(story) {
  const stages = story.stages.filter((stage) => stage.seconds > 0 || stage.stage === "load");
  const parts = stages.map(({ stage, seconds }) => [stage, seconds, `${STAGES[stage] ?? stage}: ${duration(seconds)}`]);
  const origin = sources(story);
  return [
    make("p", {}, make("code", {}, story.request_id || story.id), story.tenant ? make("span", { class: "mark", title: "a mark for the tenant, which does not reveal its name" }, story.tenant) : null),
    story.lossy_tokens ? make("p", {}, lossyMark(), ` The KV of ${plural(story.lossy_tokens, "token")} came from a tier with a lossy codec: the answer may differ from one with exact KV.`) : null,
    make("h3", {}, `What it did in ${duration(story.seconds)}`),
    bar(parts, { tall: true, label: parts.map(([, , name]) => name).join(", ") }),
    make("table", {}, make("tbody", {}, stages.map((stage) => make("tr", {},
      make("td", {}, legend([[stage.stage, STAGES[stage.stage] ?? stage.stage]])),
      make("td", { class: "num" }, duration(stage.seconds)))))),
    make("h3", {}, `Where the KV of its ${plural(story.prompt_tokens, "prompt token")} came from`),
    bar(origin, { tall: true, label: origin.map(([, , name]) => name).join(", ") }),
    legend(origin.map(([kind, tokens, name]) => [kind, `${name} (${percent(tokens / story.prompt_tokens)})`])),
    make("h3", {}, "In words"),
    ...sentences(story).map((text) => make("p", {}, text)),
  ].filter(Boolean);
}

function sentences(story) {
  const said = [];
  const matched = Object.entries(story.matched_blocks);
  if (matched.length) {
    const where = matched.map(([tier, blocks]) => `${number(blocks)} ${TIERS[tier]}`).join(", ");
    said.push(`Matched: ${where} (blocks of ${story.block_tokens} tokens).`);
  } else said.push("No part of its prompt was found in any tier.");
  const loaded = Object.entries(story.found_blocks).filter(([tier]) => tier !== "device");
  const numLoaded = loaded.reduce((sum, [, blocks]) => sum + blocks, 0);
  const loading = story.stages.filter((stage) => stage.stage === "load").reduce((sum, stage) => sum + stage.seconds, 0);
  if (numLoaded) {
    const size = numLoaded * story.block_bytes;
    const where = loaded.map(([tier, blocks]) => `${number(blocks)} ${TIERS[tier]}`).join(" and ");
    const speed = loading > 0 ? `, ${bytes(size)} in ${duration(loading)} (${rate(size / loading)})` : `, ${bytes(size)}, during the computation`;
    said.push(`Loaded ${where}${speed}.`);
  }
  const below = matched.filter(([tier]) => tier !== "device").reduce((sum, [, blocks]) => sum + blocks, 0);
  if (below > numLoaded && !Object.keys(story.lost_blocks).length) {
    said.push(`${plural(below - numLoaded, "matched block was", "matched blocks were")} computed instead, because that is estimated to be faster.`);
  }
  if (below && story.load_estimate_seconds !== null && story.compute_estimate_seconds !== null) {
    said.push(`Estimated beforehand: ${duration(story.load_estimate_seconds)} to load, ${duration(story.compute_estimate_seconds)} to compute the same.`);
  }
  if (story.reused_tokens) {
    said.push(`Of segments from elsewhere, ${plural(story.reused_tokens, "token was", "tokens were")} reused, and ${number(story.mended_tokens)} computed where they stand.`);
  }
  for (const [verdict, blocks] of Object.entries(story.lost_blocks)) {
    said.push(`${plural(blocks, "block")} did not arrive (${verdict}) and ${blocks === 1 ? "was" : "were"} computed.`);
  }
  if (story.preemptions) said.push(`Preempted ${plural(story.preemptions, "time")}; ${plural(story.recomputed_tokens, "token")} computed again.`);
  const first = story.first_token_seconds === null ? "No token was generated." : `First token after ${duration(story.first_token_seconds)}, ${plural(story.output_tokens, "token")} in all.`;
  said.push(`${first} ${ENDS[story.reason] ?? ""}`);
  return said;
}
