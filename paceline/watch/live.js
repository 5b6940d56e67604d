// Puts the pieces that the server sends into their places. A chart that somebody points at waits:
// its tooltip would vanish.
"use strict";
const MAX_LINES = 400;
const link = document.getElementById("link");
const log = document.getElementById("log");
const waiting = new Map();

function put(id, html) {
  const place = document.getElementById(id);
  if (!place) return;
  if (place.matches(":hover") && place.querySelector("svg")) {
    waiting.set(id, html);
    place.addEventListener("mouseleave", () => { release(id); }, { once: true });
    return;
  }
  place.innerHTML = html;
}

function release(id) {
  const html = waiting.get(id);
  if (html === undefined) return;
  waiting.delete(id);
  document.getElementById(id).innerHTML = html;
}

function append(lines) {
  if (!log || lines.length === 0) return;
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  for (const line of lines) {
    const row = document.createElement("span");
    row.textContent = line + "\n";
    log.append(row);
  }
  while (log.childElementCount > MAX_LINES) log.firstElementChild.remove();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

const source = new EventSource(document.body.dataset.events);
source.onopen = () => {
  link.textContent = "live";
  if (log) log.replaceChildren();
};
source.onerror = () => { link.textContent = "connection lost: trying again"; };
source.onmessage = (message) => {
  const body = JSON.parse(message.data);
  requestAnimationFrame(() => {
    for (const [id, html] of Object.entries(body.html)) put(id, html);
    append(body.lines);
    document.body.dataset.ticks = 1 + Number(document.body.dataset.ticks || 0);
  });
};
