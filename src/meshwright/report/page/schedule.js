// What the picture says under the mouse: an operation's times and what it waits for. Without this script, viewers show titles.
const frame = document.querySelector(".picture");
const svg = frame.querySelector("svg");
const tip = document.getElementById("tip");
const operations = new Map([...svg.querySelectorAll("[data-op]")].map((g) => [g.dataset.op, g]));
const sends = [...svg.querySelectorAll(".send[data-to]")];
const marks = ["same", "here", "need", "on"];
const microbatch = (name) => name.split(":")[1].match(/\d+/)[0];

for (const g of operations.values()) {
  const title = g.querySelector("title");
  g.setAttribute("aria-label", title.textContent);
  title.remove(); // the page shows it by itself
}

function clear() {
  svg.classList.remove("pointed");
  svg.querySelectorAll(marks.map((mark) => "." + mark).join()).forEach((e) => e.classList.remove(...marks));
  tip.hidden = true;
}

function point(g) {
  clear();
  const name = g.dataset.op;
  svg.classList.add("pointed");
  for (const [other, element] of operations) element.classList.toggle("same", microbatch(other) === microbatch(name));
  g.classList.add("here");
  g.dataset.needs.split(" ").filter(Boolean).forEach((need) => operations.get(need).classList.add("need", "same"));
  sends.forEach((send) => send.classList.toggle("on", microbatch(send.dataset.to) === microbatch(name)));
  tip.textContent = g.getAttribute("aria-label");
  tip.hidden = false;
}

let last = null;
svg.addEventListener("mousemove", (event) => {
  const g = event.target.closest("[data-op]");
  if (g !== last) g ? point(g) : clear();
  last = g;
  if (!g) return;
  const { innerWidth, innerHeight } = window, { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
});
svg.addEventListener("mouseleave", () => { clear(); last = null; });

// The stages' names stay where they are while the timeline is moved.
const names = svg.cloneNode(false);
const left = Math.ceil(svg.querySelector(".name").getBBox().width);
names.setAttribute("viewBox", `0 0 ${left} ${svg.viewBox.baseVal.height}`);
names.setAttribute("width", left);
names.setAttribute("class", "schedule names");
names.setAttribute("aria-hidden", "true");
names.append(...[...svg.querySelectorAll(".name")].map((name) => name.cloneNode(true)));
if (svg.viewBox.baseVal.width > frame.clientWidth) frame.append(names);

const fit = document.getElementById("fit");
if (svg.viewBox.baseVal.width <= frame.clientWidth) fit.parentElement.hidden = true;
fit.addEventListener("change", () => frame.classList.toggle("fit", fit.checked));
