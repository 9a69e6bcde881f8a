// The page is built from elements and text, never from markup, so that text from models and clients
// cannot inject any.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A bar of parts: [class, amount, name]. Widths are set through the element's style, which the content
// policy allows to the page's own scripts.
export function bar(parts, { tall = false, label = "" } = {}) {
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  const element = make("div", { class: tall ? "bar tall" : "bar", role: "img", "aria-label": label });
  for (const [kind, amount, name] of parts) {
    if (amount <= 0) continue;
    const piece = make("i", { class: kind, title: name });
    piece.style.width = `${(100 * amount) / total}%`;
    element.append(piece);
  }
  return element;
}

export function legend(parts) {
  return make("p", { class: "keyed" }, parts.map(([kind, text]) => make("span", { class: kind }, text)));
}

// Rewrites a list of rows only if it has changed, to keep focus and scrolling.
export function replaceIfNew(parent, signature, build) {
  const text = JSON.stringify(signature);
  if (parent.dataset.shown === text) return;
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  parent.dataset.shown = text;
  parent.replaceChildren(...build());
  if (focused) parent.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}
