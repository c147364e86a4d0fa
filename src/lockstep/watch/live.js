"use strict";
// The server resends the page's contents whenever the run folder changes.
const source = new EventSource("follow");
source.addEventListener("message", (event) => {
  document.querySelector("main").innerHTML = JSON.parse(event.data);
});
source.addEventListener("error", () => {
  const state = document.querySelector(".state");
  if (state !== null && source.readyState !== EventSource.OPEN) {
    state.textContent = "disconnected: `lockstep watch` has ended or cannot be reached";
    state.className = "state unknown";
  }
});
